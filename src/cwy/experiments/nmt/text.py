"""Sentences as words and punctuation, words as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")
OWN = (0, 7, 8, 9)
"""Combining classes of marks that are not accents: vowel signs, marks that make or join letters."""
# Characters inside a word that \w does not match: joiners and the 16-bit combining marks.
MARKS = "\u200c\u200d" + "".join(
    c for c in map(chr, range(0x10000)) if unicodedata.category(c).startswith("M")
)
PART = rf"\w[\w{MARKS}]*"
WORD = re.compile(rf"{PART}(?:'{PART})*|[^\w\s]")

Words = tuple[str, ...]


def words(text: str) -> Words:
    """Split a text into words and punctuation, in lower case and without accents.

    An apostrophe inside a word belongs to it.

    Example:
        >>> words("¿No está aquí?"), words("I don’t know."), words("№ 5")
        (('¿', 'no', 'esta', 'aqui', '?'), ('i', "don't", 'know', '.'), ('no', '5'))
        >>> words("हिन्दी में।")
        ('हिन्दी', 'में', '।')
    """
    # Signs such as № decompose into capital letters, so lower() comes after normalize().
    parts = unicodedata.normalize("NFKD", text.replace("’", "'")).lower()
    plain = "".join(part for part in parts if unicodedata.combining(part) in OWN)
    return tuple(WORD.findall(plain))


class Vocabulary:
    """Map words to numbers and back. The special words have the first numbers."""

    def __init__(self, known: Sequence[str]) -> None:
        self.words = [*SPECIAL, *known]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, sentences: Iterable[Words], at_least: int = 1) -> Vocabulary:
        """Collect the words that occur at least so often, the most frequent first.

        Example:
            >>> Vocabulary.of([("a", "b"), ("b", "c"), ("c", "b")], at_least=2).words[4:]
            ['b', 'c']
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        known = [word for word in counts if counts[word] >= at_least]
        return cls(sorted(known, key=lambda word: (-counts[word], word)))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def numbers(self, sentence: Words) -> list[int]:
        """Return the numbers of a sentence's words and of its end."""
        return [*(self._numbers.get(word, UNKNOWN) for word in sentence), END]

    def text(self, numbers: Iterable[int]) -> str:
        """Return the words up to the end, separated by spaces."""
        found = []
        for number in numbers:
            if number in (END, PAD):
                break
            found.append(self.words[number])
        return " ".join(found)


class Vocabularies(NamedTuple):
    """Hold the words of both languages."""

    source: Vocabulary
    target: Vocabulary
