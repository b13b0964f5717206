"""The style sheet of a report's page: the system's fonts, colours as the reader prefers them; and
the colours of series in its figures, legible on light and dark."""

COLOURS = (
    "#3b82c4", "#d1603d", "#4d9a51", "#9b6bc7", "#b8862b", "#c74b7f", "#2f9c95", "#7b7f86",
)  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #ffffff;
  --line: #d8dee4; --mark: #f3f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ec; --soft: #9aa4ae; --back: #14171a; --line: #32383f; --mark: #1c2126; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1.05rem; margin-top: 1.8rem; }
p { margin: 0.3rem 0; color: var(--soft); font-size: 0.92rem; }
p.verdict { margin: 0.6rem 0; padding: 0.6rem 0.8rem; color: var(--text); font-size: 1.05rem;
  background: var(--mark); border-radius: 6px; }
.table { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
tbody th { font-weight: 500; }
thead th { color: var(--soft); font-weight: 600; white-space: normal; overflow-wrap: normal;
  vertical-align: bottom; }
table.texts td { white-space: pre-wrap; text-align: left; vertical-align: top; min-width: 14rem; }
figure { margin: 1rem 0; max-width: 40rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { color: var(--soft); font-size: 0.85rem; }
@media print {
  :root { color-scheme: light; --text: #000; --soft: #333; --back: #fff; --line: #bbb;
    --mark: #fff; }
  main { max-width: none; padding: 0; }
  body { font-size: 10.5pt; }
  .table { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 0.15rem 0.3rem; white-space: normal; }
  figure, tr, p.verdict { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""
