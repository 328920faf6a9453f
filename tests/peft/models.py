"""Small models that need no download, and what tests do with them."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(24).reshape(2, 12)


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2():
    """A model whose linear layers keep their weights transposed."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=16)
    return GPT2LMHeadModel(config).eval()


class Images(nn.Module):
    """Two convolutions, one of them with every option, and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.last = nn.Linear(6 * 16, 5)

    def forward(self, x):
        y = self.second(self.first(x).relu()).relu()
        return self.last(y.flatten(1))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8, bias=False))


def logits(model, ids=IDS):
    return model(input_ids=ids).logits


def move(model, scale=0.5, seed=1):
    """Move every trainable parameter away from where it started."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn_like(parameter)
    return model


def gradients(model, loss):
    """The gradients of all trainable parameters, by name."""
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
