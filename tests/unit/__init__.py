"""Tests of single functions and formulas in one process, without ranks."""
