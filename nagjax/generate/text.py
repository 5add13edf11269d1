"""Makes texts from outside safe for tokenizers."""

from nagjax.runs.opening import check_text


def encodable(text: str) -> str:
    """The text with "?" for everything that has no UTF-8 form: the halves of surrogate pairs, by which Python
    represents bytes of an argument or a line of input that are not UTF-8. Raises UserError if `text` is not a str."""
    check_text(text)
    return text.encode(errors="replace").decode()
