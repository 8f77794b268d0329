"""Helpers without knowledge of training: errors, text, files, locks, native builds."""
