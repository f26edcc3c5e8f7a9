"""The text of the project is plain technical English: a word list, and where it applies.

`python tests/test_language.py PATH ...` prints the findings in files and folders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Files and folders that are checked.
CHECKED = ("README.md", "CONTRIBUTING.md", "benchmarks", "docs", "examples", "src", "tests")
SUFFIXES = {".py", ".md", ".toml", ".pbtxt", ".pyi"}

#: Regular expressions for words, alone or in a name: `desk`, `_desk` and `desk_id`.
WORDS = {
    "a person as the subject": [
        r"he|she|his|him|himself|herself|whoever|whom|whomever",
        r"somebody|nobody|anybody|everybody|someone|anyone",
        # "people who serve models" is about people; "a request who waits" is not.
        r"(?<!people )(?<!users )(?<!readers )(?<!engineers )(?<!developers )who",
    ],
    "a metaphor": [
        r"errands?|belongings|wish(?:es)?|desks?|crews?|houses?|doors?|janitors?|corridors?",
        r"(?<!warp )(?<![.\"])lanes?",  # CUDA has lanes of a warp, DLPack has `tensor.lanes`
        r"rooms|(?:a|this|each|every|which|own|\w+'s) room|the room(?! for| in| on| left)",
        r"(?:the|a|no) head(?! of| node)|heads? (?:decide|know|touch|stand)(?:e?s)?",
        r"(?:the|its|their|own|in|no|\w+'s|\w+s') hands?(?! side)",
        r"(?<!math\.)(?<!np\.)floors?(?!\(| of| division)",
    ],
}
#: The same words inside a name in capitals: `LeaseDesk`.
_IN_CAPITALS = re.compile(r"(?<=[a-z])(?:Desk|Crew|Lane|Errand|Belongings|Wish)(?:s|es)?(?![a-z])")
_FINDERS = {
    what: re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![A-Za-z])", re.IGNORECASE)
    for what, words in WORDS.items()
}


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line: word (what it is): text` for each word of the list in a file or folder."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix not in SUFFIXES or file == Path(__file__):  # this file holds the list
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for what, finder in (*_FINDERS.items(), ("a metaphor", _IN_CAPITALS)):
                for found in finder.findall(line):
                    yield f"{file.relative_to(ROOT)}:{number}: {found} ({what}): {line.strip()}"


@pytest.mark.parametrize("path", CHECKED)
def test_no_word_of_the_list_is_used(path: str) -> None:
    """Text and names are about things, in the field's words."""
    assert not list(findings(ROOT / path))


@pytest.mark.parametrize(
    "text",
    [
        "The caller is told when he is next.",
        "Whoever is cancelled is free at once.",
        "nobody waits",
        "who asked is served",
        "self._desk.take(sms)",
        "class LeaseDesk:",
        "lanes = 8",
        "each room imports those below it",
        "The head decides and never touches.",
        "in the client's hands",
        "a class with a floor",
    ],
)
def test_the_word_list_finds(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persons, metaphors, and names made of them."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(findings(page))


@pytest.mark.parametrize(
    "text",
    [
        "people who serve models",
        "The task whose kernel runs.",
        "warp lane 3",
        "tensor.lanes == 1",
        "there is no room for it in the queue",
        "head-of-line blocking, at the head of the queue, on the Ray head node",
        "attention heads: 16",
        "packed by hand; the lease is handed back",
        "math.floor(x), np.floor(x), the floor of x / 2",
    ],
)
def test_the_word_list_leaves(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of the field, and words in their literal meaning."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert not list(findings(page))


if __name__ == "__main__":
    found = [line for path in sys.argv[1:] or CHECKED for line in findings(Path(path).resolve())]
    print("\n".join(found))
    sys.exit(bool(found))
