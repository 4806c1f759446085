"""x"""


def render_page(result):
    return ""
