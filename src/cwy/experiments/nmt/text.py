"""Sentences as words and punctuation, words as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")
OWN = (0, 7, 8, 9)
"""Combining classes of marks that are no accents: vowel signs, and what makes another letter or joins two."""
# What goes on with a word though re does not count it: marks (of its 16-bit characters, for which it has a table), joiners.
MARKS = "\u200c\u200d" + "".join(
    c for c in map(chr, range(0x10000)) if unicodedata.category(c).startswith("M")
)
PART = rf"\w[\w{MARKS}]*"
WORD = re.compile(rf"{PART}(?:'{PART})*|[^\w\s]")

Words = tuple[str, ...]


def words(text: str) -> Words:
    """Lower case, without accents, cut into words and punctuation; an apostrophe inside a word belongs to it.

    Example:
        >>> words("¿No está aquí?"), words("I don’t know."), words("№ 5")
        (('¿', 'no', 'esta', 'aqui', '?'), ('i', "don't", 'know', '.'), ('no', '5'))
        >>> words("हिन्दी में।")
        ('हिन्दी', 'में', '।')
    """
    # Some signs, as №, have letters in them that are capital only once they are taken apart.
    parts = unicodedata.normalize("NFKD", text.replace("’", "'")).lower()
    return tuple(
        WORD.findall("".join(part for part in parts if unicodedata.combining(part) in OWN))
    )


class Vocabulary:
    """Words by number, the special ones first."""

    def __init__(self, known: Sequence[str]) -> None:
        self.words = [*SPECIAL, *known]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, sentences: Iterable[Words], at_least: int = 1) -> Vocabulary:
        """The words that occur so often, the frequent ones first.

        Example:
            >>> Vocabulary.of([("a", "b"), ("b", "c"), ("c", "b")], at_least=2).words[4:]
            ['b', 'c']
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        known = sorted(
            (word for word in counts if counts[word] >= at_least),
            key=lambda word: (-counts[word], word),
        )
        return cls(known)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def numbers(self, sentence: Words) -> list[int]:
        """The numbers of a sentence's words and of its end."""
        return [*(self._numbers.get(word, UNKNOWN) for word in sentence), END]

    def text(self, numbers: Iterable[int]) -> str:
        """The words up to the end, with spaces between."""
        told = []
        for number in numbers:
            if number in (END, PAD):
                break
            told.append(self.words[number])
        return " ".join(told)
