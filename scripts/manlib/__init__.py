"""Manual pages and completions, made from the commands and from the documents.

__main__.py    writes the files
commands.py    what the commands take, as click knows it
documents.py   the documents: a page for each command, and those of several
markdown.py    the subset of Markdown that these pages use
roff.py        text as man(7) macros
pages.py       the pages
completion.py  what completes a word, filled into the templates of shells/
shells/        a template for each shell, and what all of them ask: names, devices, targets
"""
