"""Sphinx's settings: the lessons with their stored outputs, readable without network or kernel."""

project = "zerolab"
copyright = "2026, the zerolab authors"  # noqa: A001 -- the name that Sphinx reads
extensions = ["myst_nb", "sphinx-mathjax-offline"]  # the second brings MathJax 3, with its fonts
html_theme = "sphinx_book_theme"
html_title = "zerolab"
html_show_sourcelink = False
html_context = {"default_mode": "light"}  # as the figures; without one the theme complains
html_theme_options = {"use_download_button": False, "use_fullscreen_button": False}
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # formulas in outputs, too
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # its scripts would come from a CDN
nb_merge_streams = True
# The numbers beside each picture are for machines.
suppress_warnings = ["mystnb.unknown_mime_type"]
exclude_patterns = ["README.md"]  # index.md takes it in
