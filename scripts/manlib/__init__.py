"""Manual pages and completions, made from the commands and from docs/cli.md.

__main__.py    writes the files
commands.py    what the commands take, as click knows it
markdown.py    the subset of Markdown that docs/cli.md uses
roff.py        text as man(7) macros
pages.py       the pages
completion.py  what completes a word, filled into the templates of shells/
shells/        a template for each shell, and what all of them ask: names, devices, targets
"""
