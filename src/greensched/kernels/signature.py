"""Read kernel signatures from CUDA source.

This is not a C++ parser. It recognises kernels whose parameters are scalars and pointers, and
refuses anything else, for which the caller must pass the parameters: a wrong guess would be a
wrong address on a GPU.

1. Comments, literals and preprocessor lines are removed first (`_tokens`), so every branch of an
   `#if` is read. Macros are not expanded.
2. A kernel is a *definition* with `__global__` and C linkage; its name is the word before the
   parentheses that precede the body.
3. A parameter is a scalar, or one pointer to a scalar or to void, of a known type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from greensched.errors import InvalidRequest
from greensched.typing import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

#: numpy's codes of the fundamental types, by their words in alphabetical order, without `signed`
#: and redundant `int`. `long` has 8 bytes: CUDA follows the host, and Linux is LP64. `char` is
#: signed, as on x86-64.
_FUNDAMENTAL = {
    ("bool",): "b1",
    ("char",): "i1",
    ("char", "unsigned"): "u1",
    ("double",): "f8",
    ("float",): "f4",
    ("int",): "i4",
    ("long",): "i8",
    ("long", "long"): "i8",
    ("long", "long", "unsigned"): "u8",
    ("long", "unsigned"): "u8",
    ("short",): "i2",
    ("short", "unsigned"): "u2",
    ("unsigned",): "u4",
    ("void",): "V1",
}
_ALIASES = {
    "__half": "f2",
    "half": "f2",
    "intptr_t": "i8",
    "ptrdiff_t": "i8",
    "size_t": "u8",
    "uintptr_t": "u8",
} | {
    f"{kind}int{8 * size}_t": f"{kind or 'i'}{size}" for kind in ("", "u") for size in (1, 2, 4, 8)
}

_TYPE_WORDS = {word for words in _FUNDAMENTAL for word in words} | {"signed"}
_QUALIFIERS = {
    *("const", "volatile", "restrict", "__restrict", "__restrict__"),
    *("__grid_constant__", "std", "cuda", "::"),
}

_TOKEN = re.compile(
    r"""
      (?P<skip>    \s+ | \\\r?\n | //(?:\\\r?\n|[^\n])* | /\*.*?\*/ )
    | (?P<line>    \#(?: \\\r?\n | //[^\n]* | /\*.*?\*/ | "[^"\n]*" | [^\n] )* )
    | (?P<raw>     (?:u8|[uUL])?R"(?P<fence>[^()\\\s"]{0,16})\(.*?\)(?P=fence)" )
    | (?P<literal> (?:u8|[uUL])?(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+') )
    | (?P<word>    [A-Za-z_]\w* )
    | (?P<number>  \.?\d(?:'?[\w.]|(?<=[eEpP])[+-])* )
    | (?P<mark>    :: | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING = {"(": ")", "[": "]", "{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    kind: str
    at: int


@dataclass(frozen=True, slots=True)
class _Definition:
    name: _Token
    parameters: list[_Token]
    has_c_linkage: bool


class Signatures:
    """The kernels that a CUDA source defines, and their parameters. Reading never blocks."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._definitions = tuple(_definitions(source))

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels with C linkage, in the order of the source."""
        return tuple(dict.fromkeys(d.name.text for d in self._definitions if d.has_c_linkage))

    def parameters(self, kernel: str) -> tuple[Parameter, ...]:
        """Return the parameters of one kernel.

        Raises:
            InvalidRequest: the source does not define the kernel, defines it without C linkage or
                in two ways, or a parameter is not a scalar or a pointer of a known type.
        """
        found = [d for d in self._definitions if d.name.text == kernel]
        if not found:
            raise InvalidRequest(self._missing(kernel))
        for definition in found:
            if not definition.has_c_linkage:
                self._refuse(definition, 'it is not extern "C", so its name is mangled')
        read = [self._read(definition) for definition in found]
        if any(parameters != read[0] for parameters in read):
            self._refuse(found[-1], "it is defined with different parameters")
        return read[0]

    def _read(self, definition: _Definition) -> tuple[Parameter, ...]:
        tokens = definition.parameters
        if not tokens or [token.text for token in tokens] == ["void"]:
            return ()
        parts = _split(tokens)
        return tuple(self._parameter(definition, part) for part in parts)

    def _parameter(self, definition: _Definition, part: list[_Token]) -> Parameter:
        parameter = _parameter([token.text for token in part])
        if parameter is None:
            text = " ".join(token.text for token in part) or "(nothing)"
            self._refuse(definition, f"cannot read its parameter {text!r}", *part[:1])
        return parameter

    def _missing(self, kernel: str) -> str:
        return (
            f"kernel {kernel!r} is not in the source (kernels there: "
            f"{', '.join(self.names) or 'none'}). A kernel is defined as "
            f'extern "C" __global__ void {kernel}(...); where a macro or a template defines it, '
            "give parameters=(...) explicitly"
        )

    def _refuse(self, definition: _Definition, problem: str, at: _Token | None = None) -> NoReturn:
        number = self._source.count("\n", 0, (at or definition.name).at) + 1
        line = self._source.split("\n")[number - 1].strip()
        raise InvalidRequest(
            f"kernel {definition.name.text!r}: {problem}; give parameters=(...) explicitly. "
            f"Line {number}: {line}"
        )


# -- parameters -------------------------------------------------------------------------------


def _parameter(words: list[str]) -> Parameter | None:
    """Return a parameter; None unless it is `type name`, `type *name` or `type name[...]`."""
    if "[" in words:  # an array parameter is a pointer
        opening = words.index("[")
        if words.count("[") > 1 or words[-1] != "]" or "*" in words:
            return None
        words = [*words[: opening - 1], "*", words[opening - 1]]
    if words.count("*") > 1:
        return None
    pointer = "*" in words
    before = words[: words.index("*")] if pointer else words[:-1]
    after = words[words.index("*") + 1 :] if pointer else words[-1:]
    names = [word for word in after if word not in _QUALIFIERS]
    dtype = _dtype([word for word in before if word not in _QUALIFIERS])
    if len(names) != 1 or not names[0].isidentifier() or names[0] in _TYPE_WORDS:
        return None
    if dtype is None or (dtype == "V1" and not pointer):
        return None
    return Parameter(names[0], dtype, pointer, const=pointer and "const" in before)


def _dtype(words: list[str]) -> str | None:
    if len(words) == 1 and words[0] in _ALIASES:
        return _ALIASES[words[0]]
    telling = sorted(word for word in words if word not in ("int", "signed"))
    if not telling and words:
        telling = ["int"]
    return _FUNDAMENTAL.get(tuple(telling))


def _split(tokens: list[_Token]) -> list[list[_Token]]:
    """Split at the commas outside brackets."""
    parts: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in _OPENING) - (token.text in _OPENING.values())
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


# -- definitions ------------------------------------------------------------------------------


def _definitions(source: str) -> Iterator[_Definition]:
    tokens = list(_tokens(source))
    blocks: list[bool] = []  # for each open brace, whether it gives C linkage
    start = 0  # of the current declaration
    for index, token in enumerate(tokens):
        if token.text == "__global__":
            prefix = tokens[start:index]
            definition = _definition(tokens, index + 1, _links_as_c(prefix) or any(blocks))
            if definition is not None:
                yield definition
        elif token.text == "{":
            blocks.append(_links_as_c(tokens[max(start, index - 2) : index]))
        elif token.text == "}" and blocks:
            blocks.pop()
        if token.text in ("{", "}", ";"):
            start = index + 1


def _definition(tokens: list[_Token], at: int, has_c_linkage: bool) -> _Definition | None:
    """Return the definition after a token; None for a declaration, or one that a macro hides.

    `word (...)` is an attribute such as `__launch_bounds__(256)` unless a body follows.
    """
    while at + 1 < len(tokens) and tokens[at].text not in ("{", "}", ";"):
        if tokens[at].kind != "word" or tokens[at + 1].text != "(":
            at += 1
            continue
        closing = _closing(tokens, at + 1)
        if closing + 1 < len(tokens) and tokens[closing + 1].text == "{":
            return _Definition(tokens[at], tokens[at + 2 : closing], has_c_linkage)
        at = closing + 1
    return None


def _closing(tokens: list[_Token], opening: int) -> int:
    """Return the index of the parenthesis that closes `opening`, or the number of tokens."""
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index].text == "(") - (tokens[index].text == ")")
        if depth == 0:
            return index
    return len(tokens)


def _links_as_c(prefix: list[_Token]) -> bool:
    words = [token.text for token in prefix]
    return ("extern", '"C"') in pairwise(words) and "template" not in words


def _tokens(source: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or ""
        if kind not in ("skip", "line", "raw"):
            yield _Token(match.group(), kind, match.start())
