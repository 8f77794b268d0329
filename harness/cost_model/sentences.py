"""What `sentences.j2` says of a layout: its name, and why it does not fit."""

from pathlib import Path

from harness.config.byte_size import format_bytes
from harness.util.sentences import Sentences

say = Sentences(Path(__file__).with_name("sentences.j2"), {"bytes": format_bytes})
