"""Configurations of other programs as settings of this project.

A file or a launch line is read by tables of equivalents (`tables`), one for each format. One interpreter reads all
of them.
"""
