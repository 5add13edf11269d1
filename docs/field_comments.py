"""Griffe extension: the comment behind a dataclass field is its documentation, as it is on the command line."""

import io
import tokenize

import griffe


class FieldComments(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **options) -> None:
        fields = [
            field
            for field in cls.members.values()
            if not field.is_alias and field.is_attribute and field.docstring is None and field.annotation is not None
        ]
        if not fields or not cls.source:
            return
        comments = _comments(cls.source)
        for field in fields:
            text = comments.get((field.endlineno or field.lineno) - cls.lineno + 1)
            if text:
                field.docstring = griffe.Docstring(text, lineno=field.lineno, parent=field)


def _comments(source: str) -> dict[int, str]:
    """Trailing comments by line, counted from 1."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    try:
        return {
            t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT and t.line.strip()[0] != "#"
        }
    except tokenize.TokenError:
        return {}
