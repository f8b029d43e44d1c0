"""``python -m training report RUN... --out report.html``: what runs and comparisons found, as a page and as pictures."""
