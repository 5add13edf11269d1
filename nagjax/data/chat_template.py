"""Chat templates: how a conversation becomes text, and which parts of the text are answers.

A template is a Jinja program in the dialect of transformers, usually written by somebody else. It runs in Jinja's
sandbox, which denies it files and Python. The sizes of a template and of its text are limited, and formats that pad a
text to any width are turned off; its running time and intermediate values are not limited. `strftime_now` gives the
time at which the template was read, so that all renderings of a conversation agree.

Answers are the text between {% generation %} and {% endgeneration %}. In a template without these tags, an answer is
the text from where the assistant is asked to answer up to where its message ends.
"""

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from nagjax.data.conversation import ANSWERS, MARKS, Message, shortened
from nagjax.errors import UserError
from nagjax.files import has_file, read_bytes
from nagjax.json_reader import parse_json

LARGEST = 1 << 17  # characters of a template
LONGEST = 1 << 24  # characters of a conversation's text
FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"

# For tokenizers without a template of their own. A turn ends where the next begins, the conversation with end-of-text.
DEFAULT = """\
{% for message in messages %}
<|{{ message['role'] }}|>
{% if message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] }}
{% endgeneration %}
{% else %}
{{ message['content'] }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""

_OPEN, _CLOSE = MARKS  # placed around answers
_SAID = "\ufdd2"  # no character by Unicode: a placeholder for a message's content
_WIDEST = 8  # largest indent and longest separators of JSON
_GROWING = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map")
_GROWING_FILTERS = ("center", "format", "indent", "wordwrap", "xmlattr", "urlize", "pprint")


class ChatTemplate:
    """One template. `tokens` are the special tokens that it may use: bos_token, eos_token and the like.

    Raises UserError for a template that is too long or is not valid Jinja.
    """

    def __init__(self, text: str, *, name: str, tokens: dict[str, str] | None = None):
        self.text, self.name, self.tokens = text, name, dict(tokens or {})
        if len(text) > LARGEST:
            raise self._error(f"has more than {LARGEST:,} characters: it is not a chat template")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise self._error("has half a surrogate pair: give a template in UTF-8")
        _ = self._program

    def _error(self, why: str) -> UserError:
        return UserError("template", self.name, why)

    @cached_property
    def _program(self) -> Any:
        try:
            return _environment().from_string(self.text)
        except Exception as error:  # another's program: Jinja's own errors, and Python's
            raise self._error(f"is not a Jinja template ({error}): give another one with --template") from None

    def _rendered(self, messages: list[Message], ask: bool, of: list[Message] | None = None) -> str:
        """The text of these messages. `of` is the conversation that they are the beginning of, for error messages."""
        parts, size = [], 0
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": ask, **self.tokens}
        try:
            for part in self._program.generate(given):
                part.encode()  # raises for half a surrogate pair
                parts.append(part)
                if (size := size + len(part)) > LONGEST:
                    raise self._error(f"makes more than {LONGEST:,} characters of one conversation")
        except UserError:
            raise
        except Exception as error:  # a template can raise anything
            part = "" if of is None else f" up to what is before message {len(messages) + 1}"
            what = f"the conversation {shortened(str(of or messages))}{part}"
            raise self._error(f"cannot show {what} ({error}): change it, or give --template") from None
        return "".join(parts)

    def render(self, messages: list[Message], *, ask: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the spans (start, stop) of its answers, in characters. With `ask`, the text
        ends with what asks for the next answer.

        Raises UserError for a conversation that the template refuses, and if answers cannot be told apart from the
        rest.
        """
        text = self._rendered(messages, ask)
        if _OPEN in text:
            plain, spans = _between_marks(text)
            if any(mark in plain for mark in MARKS):
                raise self._error("has {% generation %} inside of another: close each before the next")
            return plain, spans
        if ask or self._program.environment.marked:
            return text, []
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before = self._rendered(messages[:number], True, messages)
            through = self._rendered(messages[: number + 1], False)
            if not (text.startswith(through) and through.startswith(before)):
                fix = "shows a message in another way once others follow: mark its answers by {% generation %} and"
                raise self._error(f"{fix} {{% endgeneration %}}, and give it with --template")
            spans.append((len(before), len(through)))
        return text, spans

    def ending(self, messages: list[Message]) -> str:
        """The text that follows an answer to these messages: the end of its turn, or, if the template writes nothing
        there, the beginning of the user's next turn. Empty if the template does not show both."""
        said = [*messages, {"role": ANSWERS, "content": _SAID}]
        after = self._shown(said).rpartition(_SAID)[2].strip()
        if after:
            return after
        parts = self._shown([*said, {"role": "user", "content": _SAID}]).split(_SAID)
        return parts[1].strip() if len(parts) == 3 else ""

    def _shown(self, messages: list[Message]) -> str:
        """The text alone, for templates that show an answer in another way once other messages follow it."""
        return _between_marks(self._rendered(messages, False))[0]


def find_template(tokenizer: str, template: str | None) -> ChatTemplate:
    """The template in the file `template`, else the one beside the tokenizer.json `tokenizer`, else `DEFAULT`. Raises
    UserError if it cannot be read."""
    folder = None if tokenizer == "bytes" else Path(tokenizer).parent
    return template_in(folder, template) or ChatTemplate(DEFAULT, name="nagjax's own")


def template_in(folder: Path | None, template: str | None = None) -> ChatTemplate | None:
    """The template in the file `template`, else the one in a folder, stored as transformers does; None if there is
    none. It may use the special tokens that the folder's tokenizer_config.json names. Raises UserError if a file cannot
    be read."""
    settings = _settings(folder / SETTINGS) if folder and has_file(folder / SETTINGS) else {}
    tokens = {name: _token(value) for name, value in settings.items() if name.endswith("_token") and _token(value)}
    if template is not None:
        if not has_file(template):
            raise UserError("template", template, "there is no such file: give a Jinja template")
        return ChatTemplate(_text(Path(template)), name=template, tokens=tokens)
    if folder and has_file(folder / FILE):
        return ChatTemplate(_text(folder / FILE), name=str(folder / FILE), tokens=tokens)
    own = settings.get("chat_template")
    if isinstance(own, list):  # several templates, each with a name
        named = {one.get("name"): one.get("template") for one in own if isinstance(one, dict)}
        own = named.get("default")
    if isinstance(own, str):
        return ChatTemplate(own, name=f"{folder}/{SETTINGS}", tokens=tokens)
    return None


def _between_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    plain, spans, size = [], [], 0
    for number, part in enumerate(text.split(_OPEN)):
        answer, closed, rest = part.partition(_CLOSE) if number else ("", "", part)
        if closed:
            spans.append((size, size + len(answer)))
        plain += [answer, rest]
        size += len(answer) + len(rest)
    return "".join(plain), spans


def _text(path: Path) -> str:
    try:
        return read_bytes(path, largest=4 * LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("template", str(path), f"cannot be read: {error}") from None


def _settings(path: Path) -> dict:
    try:
        found = parse_json(read_bytes(path), lenient=True)
    except (OSError, ValueError) as error:
        raise UserError("template", str(path), f"cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str | None:
    """A special token as tokenizer_config.json stores it: its text, or an object that contains it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

        def parse(self, parser: Any) -> Any:
            self.environment.marked = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        marked = False  # whether the template has the tag
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = all(isinstance(side, int | float) and abs(side) < 2**31 for side in (left, right))
            if not numbers or operator == "**":
                raise jinja2.sandbox.SecurityError(f"the operator {operator} is for small numbers only")
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> None:
            """Disables str.format, which `is_safe_attribute` refuses."""

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in _GROWING and super().is_safe_attribute(obj, attr, value)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        wide = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
        if max(wide) > _WIDEST:
            raise jinja2.sandbox.SecurityError(f"tojson takes up to {_WIDEST} characters between two values")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, jinja2.ext.loopcontrols]
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters = {name: one for name, one in made.filters.items() if name not in _GROWING_FILTERS}
    made.filters["tojson"] = to_json
    made.globals = {name: one for name, one in made.globals.items() if name != "lipsum"}
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = datetime.now().strftime
    return made
