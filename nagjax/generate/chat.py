"""Answers in a conversation, which the model reads through its chat template."""

from collections.abc import Iterable, Mapping, Sequence

from nagjax.data.chat_template import ChatTemplate, template_in
from nagjax.data.conversation import Message, refuse_special
from nagjax.data.tokenizer import opening_of, special_ids
from nagjax.errors import UserError
from nagjax.generate.sample import check_options, cut, facts_of, generate, room_behind
from nagjax.generate.text import encodable
from nagjax.runs.opening import OpenRun, check_opened

MOST_TOKENS = 256  # default for the length of an answer


def answer(
    run: OpenRun,
    conversations: Sequence[list[Message]],
    *,
    template: str | None = None,
    tokens: int | None = None,
    **options,
) -> list[str]:
    """The model's answer to each conversation, a list of {"role": ..., "content": ...} that ends with the message to
    answer; all conversations are answered in one batch.

    template: a file with a Jinja template; None: the template in the run's folder, which training on conversations and
    imports put there.

    tokens: the most tokens of an answer; None: as many as fit the context behind the longest conversation, at most 256.

    A run that was trained here also sees the token that opened each conversation in training; an imported run sees only
    what the template writes. An answer ends where the template ends its turn, at the end of the document, or at an
    imported model's `eos_token_id`. `options` are those of `generate`: temperature, top_k, top_p, min_p, seed, slide.
    Their defaults are those of `generate`; the command's defaults are temperature 0.8 and top_p 0.95. Text in a message
    that cannot be encoded as UTF-8 is replaced.

    Raises UserError if there is no template, if the template refuses a conversation, if a message contains the text of
    a special token, and for whatever `generate` raises.
    """
    check_opened(run)
    check_options(options)
    form = find_form(run, template)
    conversations = [*conversations] if isinstance(conversations, Iterable) else conversations
    if not isinstance(conversations, list) or any(isinstance(own, Mapping) for own in conversations):
        raise UserError("conversations", conversations, "give a list of conversations, [[message, ...], ...]")
    if not conversations:
        return []
    conversations = [_read(messages) for messages in conversations]
    asked = [_asked(run, form, messages) for messages in conversations]
    if tokens is None:
        longest = max(map(len, asked))
        tokens = MOST_TOKENS if options.get("slide") else room_behind(run, longest, MOST_TOKENS)
    text = form.ending(conversations[0])
    ids, starts, _ = run.tokenizer.encode_templated([text])[0]
    marks = special_ids(run.tokenizer, map(run.tokenizer.name_of, ids.tolist()))[:1]
    told = facts_of(run, marks)
    if marks:
        before = text[: starts[ids.tolist().index(marks[0])]]
        said = lambda new: run.tokenizer.decode(new).removesuffix(before)  # noqa: E731
    else:
        said = lambda new: cut(run.tokenizer.decode(new), (text,) if text else ())  # noqa: E731
        told["finished"] = lambda row, new: said(new) != run.tokenizer.decode(new)
    return [said(new).strip() for new in generate(run.model, asked, tokens=tokens, **told, **options)]


def find_form(run: OpenRun, template: str | None) -> ChatTemplate:
    """The chat template in the file `template`, or the one in the run's folder. Raises UserError if there is none."""
    form = template_in(run.folder, template)
    if form is None:
        fix = "has no chat template: give one with --template, or train on conversations (nagjax data chat)"
        raise UserError("run", str(run.folder), fix)
    return form


def _read(messages: list[Message]) -> list[Message]:
    if not isinstance(messages, Sequence):
        raise UserError("messages", messages, 'give a list of {"role": "user", "content": "..."}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(own), str) for own in ("role", "content")):
            raise UserError("messages", message, f'message {number} is not {{"role": "user", "content": "..."}}')
    return [{**message, "content": encodable(message["content"])} for message in messages]


def _asked(run: OpenRun, form: ChatTemplate, messages: list[Message]) -> list[int]:
    """The ids of the conversation as in training: behind the token that opens a document (see
    `nagjax.data.rows.Rows`). For an imported model that was not trained here, the ids are those of the template's
    text alone, as in transformers."""
    refuse_special(messages, run.tokenizer, "messages")
    ids = run.tokenizer.encode_templated([form.render(messages, ask=True)[0]])[0].ids.tolist()
    if run.step == 0:
        return ids
    opens = opening_of(run.tokenizer)
    return [run.tokenizer.end_of_text if ids[:1] == [opens] else opens, *ids]
