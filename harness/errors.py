"""The one kind of error that is the user's to mend: shown as a single line, never as a traceback."""


class UserError(Exception):
    """A value that cannot work. The message names the dotted key, its value, the rule and the remedy."""


def one_line(message: object) -> str:
    """Any message as a single line, white space folded, for a table cell or a terminal."""
    return " ".join(str(message).split())
