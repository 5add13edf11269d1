"""Texts from outside, from which no tokenizer can fail."""

from nagjax.runs.opening import check_text


def encodable(text: str) -> str:
    """The text with "?" for what has no UTF-8 form: halves of surrogate pairs, as which Python holds the bytes of an
    argument or a line of input that are no UTF-8. Raises UserError for what is no text."""
    check_text(text)
    return text.encode(errors="replace").decode()
