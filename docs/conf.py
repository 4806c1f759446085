"""The documentation as a site: ``make docs`` builds it into build/docs, and a warning is an error."""

import megabucket

project = "megabucket"
copyright = "megabucket contributors"  # noqa: A001
release = version = megabucket.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "megabucket"
pygments_dark_style = "monokai"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_search_summary = False  # a page that is opened from a file may not read others

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
