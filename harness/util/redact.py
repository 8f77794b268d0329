"""Secrets that must not be written to a file or sent: by the names of their variables and keys, and by their values.

A name denotes a secret by one of its words: HF_TOKEN and authToken do, TOKENIZERS_PARALLELISM and AUTHOR do not.
"""

import functools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_WORDS = (
    "SECRETS?|TOKEN|CREDENTIALS?|PASS|PASSWORD|PASSWD|PASSPHRASE|PAT|AUTH|AUTHORIZATION|BEARER|JWT|COOKIE|(?<=_)PWD|"
    "(?:API|ACCESS|ACCOUNT|AUTH|ENCRYPTION|MASTER|PRIVATE|SECRET|SIGNING|SSH)[_-]?KEY"
)


def _word(words: str) -> str:
    """Return a pattern of these words within a name. Names that end in FILE, PATH and so on are of places."""
    start, end = "(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))", "(?:(?![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    return rf"{start}(?i:{words}){end}(?!(?i:[_-]?(?:FILE|PATH|DIR|FOLDER|SOCK)\b))"


_SECRET_NAME = re.compile(_word(_WORDS))

# Names that may denote a secret: such variables are left out of a record, as a lost setting is better than a leak.
_POSSIBLE_SECRET = re.compile(_word(f"{_WORDS}|KEYS?|COOKIES|PWD"))

_LONG, _SHORT = 12, 6  # characters: a value below the first may be a common word, one below the second is no secret

_COMMON = re.compile(r"[A-Za-z_.-]*|[+-]?[\d.,]+(?:e[+-]?\d+)?[A-Za-z/%]{0,5}")  # words, and numbers with their unit

# Keys by the prefixes that their issuers document: Hugging Face, OpenAI and Anthropic, GitHub, GitLab, Slack, AWS,
# Google, NVIDIA and W&B; JSON Web Tokens; private keys in PEM.
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]*\d)[\w-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{20,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|nvapi-[\w-]{20,}|wandb_v1_\w{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*-----|\Z)"
)

# user:password@ or user@ of a URL. A password may have a slash, unless what comes before it can be a port.
_USER_IN_URL = re.compile(
    r"(?<=://)(?:[^/\s@'\":\[]*:(?!\d*[/?#])(?:[^/\s'\"]+|[^\s@'\"]+)|(?P<value>[^/\s@'\":\[]+))(?=@)"
)

_QUERY_OF_URL = re.compile(rf"([?&][^=&\s]{{0,40}}{_word(f'{_WORDS}|KEY|SIG|SIGNATURE')}[^=&\s]{{0,40}}=)[^&\s#'\"]+")

_URL_WITH_USER_OR_QUERY = re.compile(r"//[^/\s]*@|://\S*\?")

# A value behind its name in a text: api_key: 'value', --auth-token value, Authorization: Bearer value. It has a digit,
# and no brackets, as expressions of code do.
_NAMED = re.compile(
    rf"((?:--[\w-]{{0,40}}{_word(_WORDS)}[\w-]{{0,40}}[ =]|{_word('BEARER')}\s"
    rf"|{_word(_WORDS)}[\w.-]{{0,40}}[\"']?\s?[=:]\s?)"
    rf"[\"']?(?:(?i:bearer|basic)\s)?)(?P<value>(?=[^\s\"'`,;&()\[\]{{}}\\]*\d)[^\s\"'`,;&()\[\]{{}}\\]{{{_SHORT},}})"
)

_LONG_WORD = re.compile(r"(?<![\w+/=.-])(?!sha\d+-)(?P<value>[A-Za-z0-9][\w+/=-]{31,})", re.ASCII)

REPLACEMENT = "[secret]"


def redacted(value: Any) -> Any:
    """Return a copy of nested plain values in which every secret is replaced. Keys of dicts stay as they are."""
    secrets = _environment_secrets()

    @functools.cache  # the lists of ranks repeat their texts
    def without_secrets(text: str) -> str:
        for secret in secrets:
            text = secret.sub(REPLACEMENT, text)
        text = _KEY.sub(REPLACEMENT, _QUERY_OF_URL.sub(rf"\1{REPLACEMENT}", text))
        for pattern, is_secret in ((_USER_IN_URL, _is_secret), (_NAMED, _is_secret), (_LONG_WORD, _is_random)):
            text = pattern.sub(functools.partial(_replaced, is_secret), text)
        return text

    def copied(entry: Any, name: str) -> Any:
        if isinstance(entry, dict):
            return {key: copied(item, str(key)) for key, item in entry.items()}
        if isinstance(entry, (list, tuple)):
            return [copied(item, name) for item in entry]
        if not isinstance(entry, str):
            return entry
        return REPLACEMENT if _SECRET_NAME.search(name) and _is_secret(entry) else without_secrets(entry)

    return copied(value, "")


def redact_file(path: Path) -> None:
    """Replace the secrets in a file of text that libraries wrote, if it exists."""
    with suppress(OSError):  # the disk may be full
        text = path.read_text("utf-8", "surrogateescape")
        if (redacted_text := redacted(text)) != text:
            path.write_text(redacted_text, "utf-8", "surrogateescape")


def _replaced(is_secret: Callable[[str], bool], match: re.Match[str]) -> str:
    """Return the text of a match without its secret: its group `value` if that is one, or all where it has none."""
    value = match["value"]
    if value is not None and not is_secret(value):
        return match[0]
    return match[0].removesuffix(value or match[0]) + REPLACEMENT


def _is_secret(value: str) -> bool:
    """Return whether the value of a name that denotes a secret is one, and no path, common word or number."""
    if len(value) < _SHORT or (len(value) < _LONG and _COMMON.fullmatch(value)):
        return False
    return not (value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value)))  # noqa: PTH110, PTH111


def _is_random(word: str) -> bool:
    """Return whether a word mixes upper case, lower case and digits as only random ones do.

    In them three of five neighbors differ in kind; in names of classes and kernels, and in hexadecimal hashes and the
    identifiers of devices, fewer than half do, or hardly any letter is in upper case.
    """
    kinds = re.sub("[A-Z]", "A", re.sub("[a-z]", "a", re.sub("[0-9]", "0", word)))
    changes = len(re.findall("A(?=[a0])|a(?=[A0])|0(?=[Aa])", kinds))
    upper, lower, digits = map(kinds.count, "Aa0")
    return digits > 0 and lower > 0 and 2 * changes >= upper + lower + digits < 10 * upper


def keys_holding_secrets(value: Any, key: str = "") -> list[str]:
    """Return the dotted keys of nested plain values whose value holds a secret."""
    if isinstance(value, dict):
        return [
            secret_key
            for name, entry in value.items()
            for secret_key in keys_holding_secrets(entry, f"{key}.{name}" if key else str(name))
        ]
    return [key] if redacted({key: value}) != map_texts({key: value}, str) else []


def may_hold_secret(name: str, value: str) -> bool:
    """Return whether an environment variable may hold a secret, by its name or its value."""
    return any(map(_POSSIBLE_SECRET.search, (name, value))) or bool(_URL_WITH_USER_OR_QUERY.search(value))


def _environment_secrets() -> list[re.Pattern[str]]:
    """Return the secrets in the environment, longest first, so that one that contains another is replaced whole.

    A path that exists is no secret: variables often name the file that holds one. A short value is one as a word alone.
    """
    secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and _is_secret(value)}
    return [
        re.compile(re.escape(secret) if len(secret) >= _LONG else rf"(?<!\w){re.escape(secret)}(?!\w)")
        for secret in sorted(secrets, key=len, reverse=True)
    ]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested plain values in which every text is changed, and tuples are lists."""
    if isinstance(value, dict):
        return {key: map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value
