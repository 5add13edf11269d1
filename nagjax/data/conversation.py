"""Conversations in JSON lines: messages with roles, or a prompt and its response."""

import json
from collections.abc import Iterator
from typing import Any

from nagjax.errors import UserError
from nagjax.json_reader import parse_json

ANSWERS = "assistant"  # the role whose messages are learnt
ROLES = ("system", "developer", "user", ANSWERS, "tool", "function", "observation", "ipython")  # that templates know
FIELDS = ("messages", "prompt", "response")  # of a line or row, all that is read of it
MARKS = "\ufdd0", "\ufdd1"  # no characters by Unicode: a template's tags put them around answers
Message = dict[str, Any]  # with `role` and `content`, and what else its template may want
_FIX = 'a conversation is {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": ..., "response": ...}'


def conversation_of(record: Any, where: str, tokenizer: Any = None) -> str:
    """The messages of one JSON object as a document: their JSON, the same for the same conversation. What a table has
    in them that JSON has not, such as a time, becomes text.

    Raises UserError naming `where`: neither form, a message that is not text, none of the assistant's, a mark, or a
    special token of `tokenizer`.
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
        raise UserError("inputs", where, "has U+FDD0 or U+FDD1, which are no characters: remove them")
    refuse_special(messages, tokenizer, where)
    return document


def messages_of(document: str) -> list[Message]:
    """The inverse of `conversation_of`."""
    return parse_json(document, lenient=True)


def refuse_special(messages: list[Message], tokenizer: Any, where: str | None = None) -> None:
    """Raises UserError, naming `where` or else the conversation, for one that spells a special token of the tokenizer,
    which would end its turn; or has a role that becomes one between <| and |>, as templates write it. A tokenizer of
    bytes has none."""
    if (special_in := getattr(tokenizer, "special_in", None)) is None:
        return
    roles = {message["role"] for message in messages}.difference(ROLES)
    for text in (*_strings(messages), *(f"<|{role}|>" for role in sorted(roles))):
        if found := special_in(valid_unicode(text)):
            fix = f"spells the special token {found}, which would end its turn: change it, or leave this one out"
            raise UserError("inputs", where or shortened(json.dumps(messages, ensure_ascii=False)), fix)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(inner)


def valid_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which has no UTF-8 form: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def shortened(document: str, longest: int = 120) -> str:
    return document if len(document) <= longest else f"{document[:longest]}..."
