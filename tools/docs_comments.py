"""The API reference shows the comment beside a field as its description, as the source does: an extension of griffe."""

from __future__ import annotations

import io
import tokenize
from typing import Any

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """`max_tokens: int = 256  # tokens to write at most` is documented by its comment."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None:
            lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
            if comment := comment_of("\n".join(lines)):
                attr.docstring = Docstring(comment, parent=attr)


def comment_of(source: str) -> str:
    """The comments of one statement, in one line, as a sentence."""
    found = [token.string.lstrip("# ") for token in _tokens(source) if token.type == tokenize.COMMENT]
    said = " ".join(comment for comment in found if not comment.startswith(("noqa", "type:", "fmt:")))
    return said[:1].upper() + said[1:]


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(source.strip()).readline))
    except (tokenize.TokenError, IndentationError):
        return []
