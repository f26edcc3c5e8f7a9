"""Completion in bash of values with a colon, such as `simulated:h200`.

Bash splits the typed text at each colon, and replaces only the text behind the last one.
"""

from __future__ import annotations

from click.shell_completion import BashComplete, CompletionItem, add_completion_class


class ColonComplete(BashComplete):
    """Complete words that bash has split at colons."""

    #: The part of the incomplete word that bash keeps, before the part that it replaces.
    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the incomplete one, and the incomplete one, whole again."""
        before, last = super().get_completion_args()
        words: list[str] = []
        for word in (*before, last):
            if words and word and (word == ":" or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        *before, whole = words
        self._kept = whole if last == ":" else whole.removesuffix(last)
        return before, whole

    def format_completion(self, item: CompletionItem) -> str:
        """Return a line for bash, with the part that it replaces."""
        item.value = item.value.removeprefix(self._kept)
        return super().format_completion(item)


def register() -> None:
    """Use this class for bash from now on."""
    add_completion_class(ColonComplete)
