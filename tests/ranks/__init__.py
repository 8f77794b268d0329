"""Tests that start real ranks on this machine."""
