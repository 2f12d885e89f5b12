"""The documentation: pages in Markdown, `mkdocs.yml` beside this folder, and the generator of `docs/reference`."""
