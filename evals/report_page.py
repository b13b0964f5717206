"""A report as one HTML file: no script, no outside resource, light and dark, for phones and paper.

Each number stands in a <data> element whose value is the summary's own, unrounded. The page is also
well-formed XML, so that what is wrong with it shows in a test.
"""

from __future__ import annotations

from typing import Any

from .report_blocks import blocks
from .report_pieces import Block, Figure, Heading, Sentence, Texts
from .report_plots import figure_svg
from .report_style import STYLE
from .summary import Json

TEMPLATE = """<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="generator" content="lowbit {{ version }}"/>
<title>{{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{%- macro cell(pieces) -%}
{%- for piece in pieces -%}
{%- if piece.value is none -%}{{ piece.text }}
{%- else -%}<data value="{{ exact(piece.value) }}">{{ piece.text }}</data>{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{% for kind, block in blocks %}
{% if kind == "heading" %}<h{{ block.level }}>{{ block.text }}</h{{ block.level }}>
{% elif kind == "verdict" %}<p class="verdict">{{ cell(block.pieces) }}</p>
{% elif kind == "sentence" %}<p>{{ cell(block.pieces) }}</p>
{% elif kind == "figure" %}<figure>{{ block.svg|safe }}<figcaption>{{ block.caption }}</figcaption>\
</figure>
{% elif kind == "texts" %}<div class="table"><table class="texts">
<thead><tr>{% for h in block.headings %}<th scope="col">{{ h }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}<tr>{% for text in row %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% else %}<div class="table"><table>
<thead><tr>{% for h in block.headings %}<th scope="col">{{ h }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}<tr>{% for c in row %}\
{% if loop.first %}<th scope="row">{{ cell(c) }}</th>{% else %}<td>{{ cell(c) }}</td>{% endif %}\
{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endif %}
{%- endfor %}
</main>
</body>
</html>
"""


def html(summary: Json, title: str) -> str:
    """The whole page. UserError where matplotlib is not installed."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True
    )
    found = [_shown(block, summary, i) for i, block in enumerate(blocks(summary))]
    return environment.from_string(TEMPLATE).render(
        title=title,
        style=STYLE,
        version=summary["producer"]["version"],
        exact=repr,
        blocks=found,
    )


def _shown(block: Block, summary: Json, place: int) -> tuple[str, Any]:
    """How the template takes a block: its kind, and itself or what it becomes."""
    if isinstance(block, Heading):
        return "heading", block
    if isinstance(block, Sentence):
        return ("verdict" if block.strong else "sentence"), block
    if isinstance(block, Figure):
        svg = figure_svg(block.kind, summary["groups"][block.group], f"f{place}")
        return "figure", {"svg": svg, "caption": block.caption}
    return ("texts" if isinstance(block, Texts) else "table"), block
