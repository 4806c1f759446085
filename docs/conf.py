"""The documentation as a site: ``make docs`` builds it into build/docs, and a warning is an error."""

import megabucket

project = "megabucket"
copyright = "the megabucket authors"  # noqa: A001
release = version = megabucket.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "megabucket"
html_static_path = ["_static"]
html_show_sphinx = False

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
