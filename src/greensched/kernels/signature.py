"""Read kernel signatures from CUDA source.

This is not a C++ parser. It recognises kernels whose parameters are scalars and pointers. For
any other kernel the caller must pass the parameters, because a wrong guess would be a wrong
address on a GPU.

1. Comments, literals and preprocessor lines are removed first (`_tokens`), so every branch of an
   `#if` is read. Macros are not expanded.
2. A kernel is a *definition* with `__global__` and C linkage; its name is the word before the
   parentheses that precede the body.
3. A parameter is a scalar, or one pointer to a scalar or to void, of a known type.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
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

#: An unclosed comment or literal ends with its line or the source: no character is read twice.
_TOKEN = re.compile(
    r"""
      (?P<skip>    \s++ | \\\r?\n | //(?:\\\r?\n|[^\n])*+ | /\*.*?(?:\*/|\Z) )
    | (?P<line>    \#(?: \\\r?\n | //[^\n]* | /\*.*?(?:\*/|\Z) | "[^"\n]*" | [^\n] )*+ )
    | (?P<raw>     (?:u8|[uUL])?R"(?P<fence>[^()\\\s"]{0,16})\((?:.*?\)(?P=fence)"|.*\Z) )
    | (?P<literal> (?:u8|[uUL])?
                   (?:"(?:\\(?:\r\n|.)|[^"\\\n])*+"?|'(?:\\(?:\r\n|.)|[^'\\\n])*+'?) )
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
    start: int  # of the parameters, in the source
    end: int
    has_c_linkage: bool


class Signatures:
    """The kernels that a CUDA source defines, and their parameters.

    Reading never blocks, and takes time proportional to the source's length, whatever its content.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._definitions: dict[str, list[_Definition]] = {}
        for definition in _definitions(list(_tokens(source))):
            self._definitions.setdefault(definition.name.text, []).append(definition)
        #: The kernels with C linkage, in the order of the source.
        self.names = tuple(
            name
            for name, definitions in self._definitions.items()
            if any(definition.has_c_linkage for definition in definitions)
        )

    def parameters(self, kernel: str) -> tuple[Parameter, ...]:
        """Return the parameters of one kernel.

        Raises:
            InvalidRequest: The source does not define the kernel, defines it without C linkage or
                in two ways, or a parameter is not a scalar or a pointer of a known type.
        """
        definitions = self._definitions.get(kernel)
        if definitions is None:
            raise InvalidRequest(self._missing(kernel))
        for definition in definitions:
            if not definition.has_c_linkage:
                self._refuse(definition, 'it is not extern "C", so its name is mangled')
        read = [self._read(definition) for definition in definitions]
        if any(parameters != read[0] for parameters in read):
            self._refuse(definitions[-1], "it is defined with different parameters")
        return read[0]

    def _read(self, definition: _Definition) -> tuple[Parameter, ...]:
        tokens = list(_tokens(self._source, definition.start, definition.end))
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
            f'extern "C" __global__ void {kernel}(...); if a macro or a template defines it, '
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


def _definitions(tokens: list[_Token]) -> Iterator[_Definition]:
    closing = _closings(tokens)
    names = _names(tokens, closing)
    openings: set[int] = set()
    blocks: list[bool] = []  # for each open brace, whether it gives C linkage
    open_c_blocks = 0
    links_as_c = is_template = False  # of the current declaration
    for index, token in enumerate(tokens):
        text = token.text
        if text == "__global__":
            name = names[index + 1]
            if name is not None and name not in openings:
                openings.add(name)
                has_c_linkage = (links_as_c and not is_template) or open_c_blocks > 0
                end = tokens[closing[name + 1]].at
                yield _Definition(tokens[name], tokens[name + 1].at + 1, end, has_c_linkage)
        elif text == "template":
            is_template = True
        elif text == '"C"' and index and tokens[index - 1].text == "extern":
            links_as_c = True
        elif text == "{":
            is_c_block = [t.text for t in tokens[max(0, index - 2) : index]] == ["extern", '"C"']
            blocks.append(is_c_block)
            open_c_blocks += is_c_block
        elif text == "}" and blocks:
            open_c_blocks -= blocks.pop()
        if text in ("{", "}", ";"):
            links_as_c = is_template = False


def _names(tokens: list[_Token], closing: dict[int, int]) -> list[int | None]:
    """Return, for each token, the index of the name of the next definition from there on.

    It is None if the declaration ends before a body, or a macro hides the definition. `word (...)`
    is an attribute such as `__launch_bounds__(256)` unless a body follows.
    """
    names: list[int | None] = [None] * (len(tokens) + 2)
    for at in range(len(tokens) - 2, -1, -1):
        if tokens[at].text in ("{", "}", ";"):
            continue
        if tokens[at].kind != "word" or tokens[at + 1].text != "(":
            names[at] = names[at + 1]
        elif at + 1 in closing:
            after = closing[at + 1] + 1
            has_body = after < len(tokens) and tokens[after].text == "{"
            names[at] = at if has_body else names[after]
    return names


def _closings(tokens: list[_Token]) -> dict[int, int]:
    """Return the index of each closing parenthesis by the index of its opening one."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.text == "(":
            opened.append(index)
        elif token.text == ")" and opened:
            closing[opened.pop()] = index
    return closing


def _tokens(source: str, start: int = 0, end: int = sys.maxsize) -> Iterator[_Token]:
    for match in _TOKEN.finditer(source, start, end):
        kind = match.lastgroup or ""
        if kind not in ("skip", "line", "raw"):
            yield _Token(match.group(), kind, match.start())
