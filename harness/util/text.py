"""TODO harness.util.text."""


def one_line(message: object) -> str:
    """Any message as a single line, white space folded, for a table cell or a terminal."""
    return " ".join(str(message).split())


def sanitize(text: object) -> str:
    """Any text as one line without characters that steer a terminal or a parser."""
    line = one_line(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
