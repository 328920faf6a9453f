"""Bad input gets an error that names the call, what came, and what to do."""

import jax.numpy as jnp
import numpy as np
import pytest

from cwy.jax import WY, cwy_matrix, cwy_multiply, householder_vectors, init, rollout, tcwy_matrix

EYE = np.eye(3, dtype="float32")
X = np.zeros((4, 2, 3), "float32")
H = np.zeros((2, 3), "float32")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cwy_matrix([1.0]), "cwy_matrix: v must be a jax.Array"),
        (lambda: cwy_matrix(np.ones(3)), r"must have shape \(\*, N, L\)"),
        (lambda: cwy_matrix(np.ones((3, 2), int)), "must be floating-point"),
        (lambda: cwy_matrix(EYE, signs=np.ones(2)), "one number per column"),
        (lambda: cwy_matrix(EYE, signs=2 * np.ones(3)), "must be ±1"),
        (lambda: tcwy_matrix(np.ones((2, 3))), "M <= N, got N = 2, M = 3"),
        (lambda: cwy_multiply(EYE, np.ones((3, 2))), "x must be"),
        (lambda: householder_vectors(2 * EYE), "not orthogonal"),
        (lambda: householder_vectors(EYE[:2]), "expected N >= M"),
        (lambda: householder_vectors(EYE, 4), "between 1 and 3"),
        (lambda: rollout(X, H, np.eye(2)), r"transition must be \(3, 3\)"),
        (lambda: rollout(X[:, :1], H, EYE), r"expected x \(T, 2, 3\)"),
        (lambda: rollout(X, H, EYE, nonlinearity="softplus"), "must be one of 'modrelu'"),
        (lambda: rollout(X, H, EYE, lengths=[5, 1]), "whole numbers from 1 to T = 4"),
        (lambda: rollout(X, H, EYE, signs=np.ones(3)), "signs belong to factors"),
        (lambda: rollout(X, H, WY(EYE, np.eye(2)), output="all"), "the factors must be"),
        (lambda: rollout(X, H, EYE, output="first"), "'all' or 'last'"),
        (lambda: rollout(X, H, EYE * 1j, nonlinearity="tanh"), "has no complex form"),
        (lambda: rollout(X, H, EYE, jnp.ones(3) * 1j), "bias must be real"),
        (lambda: init.henaff(None, 3, 2), "makes a square matrix"),
        (lambda: init.haar(None, 3, reflections=2), "do not reach"),
        (lambda: init.random(None, 3, 2, reflections=1), "reflections must be 2"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
