"""The report of a comparison from its recorded files alone: a table in the terminal, a page in Markdown and in HTML.

    record.json of every run
          |
        view.py ----- the runs, and a line for all repeats of a configuration
          |
        lines.py, labels.py, comparability.py ----- a line, its name, and which lines may be compared
        speeds.py -> ranking.py ------------------- what is certainly faster, smaller, on the front
          |
        sections.py ----- the table of contents; each part returns sections as plain data (document.py):
          |                 first_screen.py, answers.py, findings.py, caveats.py             what sentences.j2 says
          |                 overview.py, resources.py, memory_sections.py, ...               tables
          |                 columns.py, which writes columns of values in units                          their columns
          |                 claims.py, derivations.py, sources.py         papers, arithmetic, plans beside simulations
          |                 charts/ ----- Vega-Lite, drawn by charts/render.py or in the page
          |
        tables.py (terminal), markdown.py and html.py with page/, files.py ----- how they are written

Plans take the same way from plan_page.py; diff.py compares two folders (folder_changes.py).
"""
