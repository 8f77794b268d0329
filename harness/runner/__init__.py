"""One run from its configuration to its record: planned, refused or launched, proven, written down."""
