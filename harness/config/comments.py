"""The comments at the top of the configuration's YAML files, which say what an entry is."""


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a YAML file, without `# @package` lines."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")
