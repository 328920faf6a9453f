"""How plainly pages and docstrings are written: long sentences, semicolons, inverted openings.

The limits hold for all pages together, and for all docstrings together. A failure lists the
sentences to rewrite.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import cwy

ROOT = Path(__file__).parent.parent
SOURCE = Path(cwy.__file__).parent

LONG = 30
LONGER = 35
"""Words in a sentence. 25 are the habit."""
MOST_LONG = 25
MOST_LONGER = 3
SEMICOLONS = 1.0
INVERTED = 1.5
DIALECT = 1.5
"""The most per 1000 words."""

OPENING = re.compile(
    r"(?:Of|By|What|Which|Where|From|Beside|Below|Beyond|Without|Among|At) ",
)
"""Words before the subject, with which a sentence should not start."""

VERBS = """
Adapt Add Adjust Advance Allocate Allow Append Apply Ask Assert Assign Attach Average Begin Bind
Break Bring Build Call Cancel Capture Center Change Check Choose Claim Clear Close Collect Combine
Compare Compile Compress Compute Configure Connect Constrain Construct Continue Convert Convolve
Copy Correct Count Create Declare Decode Define Delete Derive Descend Describe Detach Differentiate
Divide Do Download Draw Drive Drop Encode End Enter Estimate Evaluate Expand Export Extend Extract
Fail Fetch Fill Find Fit Fix Flatten Flip Flush Fold Follow Forget Form Gather Generate Give Group
Guard Hand Handle Hash Hide Hold Ignore Import Initialize Insert Install Invert Join Keep Label
Launch Leave Let List Load Look Make Map Mark Measure Merge Mirror Mix Move Multiply Name Normalize
Open Order Pack Pad Parse Pass Permute Pick Predict Prepare Print Profile Publish Put Raise Reach
React Read Recall Receive Recompute Recover Reduce Refuse Register Release Remember Remove Render
Repeat Replace Replay Report Request Reset Reshape Resize Restore Resume Retract Return Reverse
Rewrite Rotate Round Run Save Select Send Serve Set Show Simulate Skip Solve Sort Spell Split Stack
Start Stop Store Subtract Summarize Synchronize Tabulate Take Time Tokenize Train Translate
Transpose Treat Try Tune Turn Undo Unpack Unwrap Update Use Validate Verify Visit Wait Warm Warn
Watch Widen Wrap Write Yield
"""
"""Imperatives with which a docstring may start. Add another verb here when one is needed."""

PRIVATE = re.compile(
    r"\b(?:waits? for the device|without a word|by factors|unformed|beside it"
    r"|stands? (?:in|for|there)|is none|are none"
    r"|a (?:twenty|thirt|fort|fift|sixt)\w*[- ]?(?:first|second|third|eighth)? of"
    r"|on its clock|told|by hand|alone)\b"
)
"""Words that this project used in a sense of its own."""

BRITISH = re.compile(
    r"\b\w*(?:optimis|normalis|initialis|factoris|recognis|synchronis|penalis|parametris|parameteris"
    r"|generalis|minimis|maximis|vectoris|colour|behaviour|neighbour|centre|modell)\w*",
    re.IGNORECASE,
)

# What is no prose: blocks of code, macros, tables, headings, HTML, prompts, lists of links.
CODE = re.compile(r"```.*?```", re.DOTALL)
MACRO = re.compile(r"\{\{.*?\}\}", re.DOTALL)
LINES = re.compile(r"^\s*(?:\||#|<|>>>|\.\.\. |- \[).*$", re.MULTILINE)
SECTION = re.compile(
    r"^\s*(?:Args|Attributes|Returns|Raises|Examples?|References|Yields):\s*$", re.MULTILINE
)
DISPLAY = re.compile(r"\$\$.*?\$\$", re.DOTALL)
INLINE = re.compile(r"`[^`]*`|\$[^$]*\$")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")

# A blank line, a bullet, a number, or the name of an argument starts a new block.
BLOCK = re.compile(
    r"\n\s*\n|\n\s*[-*] |\n\d+\. |\n\s*(?=[\w*, ]{1,40}(?: \([^)\n]*\))?: )",
)
END = re.compile(r"(?<=[.!?:]) +(?=[A-Z`\"'])")
FEWEST = 4
"""Fewer words are a label, not a sentence."""


def prose(text):
    """Return a text without what is no prose. Code and maths inside a sentence become one word."""
    text = CODE.sub(" ", text)
    text = MACRO.sub("X", text)
    text = LINES.sub(" ", text)
    text = SECTION.sub("\n", text)
    text = DISPLAY.sub(" X ", text)
    # In one pass, so that a bracket inside code is not taken for a link.
    either = re.compile(f"{INLINE.pattern}|{LINK.pattern}")
    return either.sub(lambda found: found[1] or "X", text)


def sentences(text):
    """Return the sentences of a page or docstring."""
    found = []
    for block in BLOCK.split(prose(text)):
        flat = " ".join(block.split())
        found += [one for one in END.split(flat) if len(one.split()) >= FEWEST]
    return found


def documented(source, kinds):
    """Return the docstrings of the modules, classes or functions of a file."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    texts = [ast.get_docstring(node) for node in nodes]
    return [text for text in texts if text]


def docstrings(source):
    """Return the docstrings of a file, one after another."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(documented(source, kinds))


def without_verb(source):
    """Return the first lines of docstrings of classes and functions that start with no verb."""
    verbs = set(VERBS.split())
    texts = documented(source, (ast.ClassDef, ast.FunctionDef))
    return [text.splitlines()[0] for text in texts if text.split()[0].rstrip(",") not in verbs]


@dataclass(frozen=True)
class Count:
    """What a set of sentences holds that it should not."""

    words: int
    long: list[str]
    longer: list[str]
    semicolons: list[str]
    inverted: list[str]
    dialect: list[str]

    def per_thousand(self, found):
        return 1000 * len(found) / self.words


def count(found):
    return Count(
        words=sum(len(one.split()) for one in found),
        long=[one for one in found if len(one.split()) > LONG],
        longer=[one for one in found if len(one.split()) > LONGER],
        semicolons=[one for one in found for _ in range(one.count(";"))],
        inverted=[one for one in found if OPENING.match(one)],
        dialect=[one for one in found for _ in PRIVATE.findall(one)],
    )


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(SOURCE.rglob("*.py"))
TEXTS = {
    "pages": [path.read_text(encoding="utf-8") for path in PAGES],
    "docstrings": [docstrings(path.read_text(encoding="utf-8")) for path in MODULES],
}


@pytest.mark.parametrize("kind", TEXTS)
def test_sentences_are_short_and_plain(kind):
    counted = count([one for text in TEXTS[kind] for one in sentences(text)])
    assert counted.words > 5000
    assert len(counted.longer) <= MOST_LONGER, counted.longer
    assert len(counted.long) <= MOST_LONG, counted.long
    assert counted.per_thousand(counted.semicolons) <= SEMICOLONS, counted.semicolons
    assert counted.per_thousand(counted.inverted) <= INVERTED, counted.inverted
    assert counted.per_thousand(counted.dialect) <= DIALECT, counted.dialect


@pytest.mark.parametrize("kind", TEXTS)
def test_spelling_is_american(kind):
    found = [word for text in TEXTS[kind] for word in BRITISH.findall(prose(text))]
    assert found == []


CODE_FILES = [*MODULES, *sorted((ROOT / "docs").rglob("*.py"))]


def test_docstrings_start_with_a_verb():
    found = {
        path.name: lines
        for path in CODE_FILES
        if (lines := without_verb(path.read_text(encoding="utf-8")))
    }
    assert found == {}, "start with an imperative, or add it to VERBS"


def test_a_docstring_without_a_verb_is_found():
    source = """
class Cell:
    '''One step of a layer.'''

    def forward(self):
        '''Return the state.'''

    def close(self):
        '''Remember, while entered, the signal.'''

def run():
    '''Returns the status.'''
"""
    assert without_verb(source) == ["One step of a layer.", "Returns the status."]


def test_a_page_is_split_into_sentences():
    page = """# A heading is left out

A first one; it ends here. Then `code; inside` and $x; y$ count as words.
At the start there is [a link](to/a/page.md), so this opening is inverted.

| a table | is left out |

These follow:
- A bullet is told apart from others.
- Too short.

```python
for code in blocks: "At the start; of code"
```
"""
    counted = count(sentences(page))
    assert sentences(page) == [
        "A first one; it ends here.",
        "Then X and X count as words.",
        "At the start there is a link, so this opening is inverted.",
        "A bullet is told apart from others.",
    ]
    assert counted.words == 6 + 7 + 12 + 7
    assert len(counted.semicolons) == 1
    assert counted.inverted == ["At the start there is a link, so this opening is inverted."]
    assert counted.dialect == ["A bullet is told apart from others."]


def test_a_long_sentence_is_found_at_its_limit():
    thirty = "word " * (LONG - 1) + "end."
    assert count(sentences(thirty)).long == []
    assert len(count(sentences("word " + thirty)).long) == 1


def test_arguments_of_a_docstring_are_sentences_of_their_own():
    text = docstrings(
        'def f(n):\n    """Return what is asked for.\n\n    Args:\n'
        "        n: how many there are to be.\n            It counts from one.\n"
        '        m, k: two sizes at once here.\n    """\n'
    )
    assert sentences(text) == [
        "Return what is asked for.",
        "n: how many there are to be.",
        "It counts from one.",
        "m, k: two sizes at once here.",
    ]
