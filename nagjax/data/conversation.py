"""Conversations in JSON lines: messages with roles, or a prompt and its response."""

import json
from collections.abc import Iterator
from typing import Any

from nagjax.errors import UserError
from nagjax.json_reader import parse_json

ANSWERS = "assistant"  # the role whose messages are training targets
ROLES = ("system", "developer", "user", ANSWERS, "tool", "function", "observation", "ipython")  # known to templates
FIELDS = ("messages", "prompt", "response")  # the fields of a line or row that are read
MARKS = "\ufdd0", "\ufdd1"  # no characters by Unicode: placed around answers by a template's tags
Message = dict[str, Any]  # has `role` and `content`, and whatever else its template uses
_FIX = 'a conversation is {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": ..., "response": ...}'


def conversation_of(record: Any, where: str, tokenizer: Any = None) -> str:
    """The messages of one JSON object as a document: JSON text, which is the same for equal conversations. Values of a
    table that JSON lacks, such as times, become text.

    Raises UserError naming `where` if the object has neither form, if a message is not text, if none is the
    assistant's, and if one contains a mark or a special token of `tokenizer`.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if messages is None and isinstance(record, dict) and {"prompt", "response"} <= record.keys():
        messages = [
            {"role": "user", "content": record["prompt"]},
            {"role": ANSWERS, "content": record["response"]},
        ]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError("inputs", where, _FIX)
    for number, message in enumerate(messages, 1):
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UserError("inputs", where, f"message {number} has no text as role and content: {_FIX}")
    if not any(message["role"] == ANSWERS and message["content"] for message in messages):
        raise UserError("inputs", where, f"no message of the role {ANSWERS}: there is nothing to learn in it")
    document = json.dumps(messages, ensure_ascii=False, sort_keys=True, default=str)
    if any(mark in document for mark in MARKS):
        raise UserError("inputs", where, "has U+FDD0 or U+FDD1, which are not characters: remove them")
    refuse_special(messages, tokenizer, "inputs", where)
    return document


def messages_of(document: str) -> list[Message]:
    """The inverse of `conversation_of`."""
    return parse_json(document, lenient=True)


def refuse_special(messages: list[Message], tokenizer: Any, field: str, where: str | None = None) -> None:
    """Raises UserError for `field`, naming `where` or else the conversation, if `special_in` finds something."""
    if found := special_in(messages, tokenizer):
        fix = f"spells the special token {found}, which would end its turn: change it, or leave this one out"
        raise UserError(field, where or shortened(json.dumps(messages, ensure_ascii=False)), fix)


def special_in(messages: list[Message], tokenizer: Any) -> str:
    """The special token whose text a message contains, or a role becomes between <| and |>, where templates write it;
    "" if there is none. A byte tokenizer has no special tokens."""
    found_in = getattr(tokenizer, "special_in", None) or (lambda text: "")
    roles = {message["role"] for message in messages}.difference(ROLES)
    texts = (*_strings(messages), *(f"<|{role}|>" for role in sorted(roles)))
    return next(filter(None, (found_in(valid_unicode(text)) for text in texts)), "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(inner)


def valid_unicode(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def shortened(document: str, longest: int = 120) -> str:
    return document if len(document) <= longest else f"{document[:longest]}..."
