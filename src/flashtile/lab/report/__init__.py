"""One self-contained HTML page from the files under results/."""
