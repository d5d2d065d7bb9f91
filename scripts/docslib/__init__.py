"""The documents as a site, for scripts/docs.

__main__.py  the command
links.py     links and headings of a page, and which links lead nowhere
generated.py the documents that are made from code and tests
pages.py     which pages there are, in which order
site.py      the pages as mkdocs wants them, and the site that mkdocs makes of them
"""
