"""Make the parts of a page: figures, tables and sentences, in files with the titles of the page."""
