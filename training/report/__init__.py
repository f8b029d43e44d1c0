"""``head-gates report RUN... --output report.html``: what runs and comparisons found, as a page and as pictures."""
