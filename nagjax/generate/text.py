"""Texts from outside, from which no tokenizer can fail."""


def encodable(text: str) -> str:
    """The text with "?" for what has no UTF-8 form: halves of surrogate pairs, as which Python holds the bytes of an
    argument or a line of input that are no UTF-8."""
    return text.encode(errors="replace").decode()
