"""Style sheet of the page: system fonts, a single accent colour, dark and light mode, narrow layout, print."""

from __future__ import annotations

_ROLES = ("page", "ink", "muted", "line", "panel", "accent", "gain", "harm")
_SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
_PARTS = ("p0", "p1", "p2", "p3", "p4", "p5", "p6")
_NAMES = _ROLES + _SERIES + _PARTS
_LIGHT = """
#fdfdfc #1e2329 #5a646e #dfe3e6 #f4f5f5 #1f6fb5 #1d7048 #a8401f
#7a828c #a3abb3 #ad7d1f #7d5ba6 #1f6fb5 #c4542d #2f8f83 #7b8030
#3a78ad #cf9f4a #7fae88 #ad86ad #8fb8d8 #9aa2aa #c97d6b
"""
_DARK = """
#15181c #e3e7eb #9aa5af #2c333a #1c2126 #6db0ee #6cc795 #f0937a
#98a1ab #6f7983 #d9ab55 #b598da #62a8e8 #ec8a62 #5cc0b3 #bcc06a
#5b9bd3 #d3a655 #7db58a #b690b8 #375f80 #7f8993 #d38a78
"""

_PAGE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Helvetica Neue",sans-serif;
 font-variant-numeric:tabular-nums;overflow-wrap:break-word}
main{max-width:1000px;margin:0 auto;padding:40px 24px 72px}
p{margin:.5em 0;max-width:44em}
h1{font-size:clamp(1.45rem,3.4vw,2.1rem);line-height:1.25;font-weight:650;letter-spacing:-.012em;margin:.45em 0 .35em;
 max-width:30em;overflow-wrap:anywhere}
h2{font-size:1.22rem;font-weight:650;margin:3.2rem 0 .5rem;padding-top:1.1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;font-weight:650;margin:1.8rem 0 .4rem;overflow-wrap:anywhere}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.lead{font-size:1.1rem}
.over{color:var(--muted);font-size:.875rem;margin:0 0 1.1rem;overflow-wrap:anywhere}
.note{max-width:62em}
.muted,.note,figcaption{color:var(--muted);font-size:.875rem;overflow-wrap:anywhere}
nav{margin-top:2rem;font-size:.875rem;line-height:2}
nav a{margin-right:1.15em;white-space:nowrap}
.badge{display:inline-block;padding:.1em .6em;border-radius:99px;border:1px solid currentColor;font-size:.8rem;
 font-weight:600;line-height:1.5;white-space:nowrap;color:var(--muted)}
.badge.gain{color:var(--gain)}
.badge.harm{color:var(--harm)}
header>.badge{font-size:.95rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:1.8rem 0 0}
.tile{background:var(--panel);border-radius:10px;padding:14px 16px 13px}
.tile dt{font-size:.84rem;color:var(--muted);line-height:1.35}
.tile .value{font-size:1.72rem;font-weight:620;letter-spacing:-.015em;margin:.12em 0;line-height:1.25}
.tile dd{margin:0;font-size:.8rem;color:var(--muted);line-height:1.4;overflow-wrap:anywhere}
.tile dd.value{color:var(--ink)}
"""

_TABLES = """
.scroll{overflow-x:auto;margin:.7rem 0}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.45}
th,td{text-align:left;vertical-align:baseline;padding:8px 14px 8px 0;border-bottom:1px solid var(--line);
 overflow-wrap:break-word}
th:last-child,td:last-child{padding-right:0}
thead th{font-weight:600;color:var(--muted);font-size:.8rem;vertical-align:bottom}
td.n,th.n{text-align:right}
.tight{white-space:nowrap}
tr.group th{padding-top:20px;font-size:.875rem;color:var(--ink);overflow-wrap:anywhere}
tbody tr.group:first-child th{padding-top:12px}
table.facts td:first-child{width:14em;color:var(--muted)}
td .badge+span{margin-left:.6em;color:var(--muted);font-size:.84rem}
details{margin:.35em 0}
summary{cursor:pointer;color:var(--muted);font-size:.82rem}
details.block>summary{font-size:.9rem;color:var(--accent);margin:.8em 0}
td ul{margin:.3em 0;padding-left:1.1em;font-size:.82rem;color:var(--muted)}
main>ul,section>ul{padding-left:1.2em;max-width:44em;overflow-wrap:anywhere}
pre{background:var(--panel);border-radius:10px;padding:14px 16px;font-size:.84rem;white-space:pre-wrap;
 overflow-wrap:anywhere;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
figure{margin:1.2rem 0;max-width:620px}
figure svg{display:block;width:100%;height:auto;color:var(--ink)}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif!important}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2em 1.3em;padding:0;margin:.5rem 0;font-size:.84rem}
.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:1.5em;border-top:3px solid;vertical-align:.26em;margin-right:.45em}
@media (max-width:720px){
 main{padding:24px 16px 56px}
 .tiles{grid-template-columns:1fr 1fr;gap:8px}
 .tile{padding:11px 12px}.tile .value{font-size:1.35rem}
 .scroll{overflow-x:visible}
 table,tbody,tr,td,tr.group th{display:block}
 .tight{white-space:normal}
 tr.group{border:0;padding:6px 0 0}
 tr.group th{border:0;padding-bottom:0}
 table.facts td:first-child{width:auto}
 thead{display:none}
 tr{border-bottom:1px solid var(--line);padding:9px 0}
 td,td.n{border:0;padding:2px 0;text-align:left;display:grid;grid-template-columns:8.5em minmax(0,1fr);gap:.6em}
 td::before{content:attr(data-label);color:var(--muted)}
 td:first-child{font-weight:600}
 td.bare{display:block}
 td>div{min-width:0;overflow-wrap:anywhere}
}
@media print{
 main{max-width:none;padding:0}
 nav,summary{display:none}
 section,figure,tr,.tile{break-inside:avoid}
 h2,h3{break-after:avoid}
 section{break-inside:auto}
 details::details-content{content-visibility:visible;height:auto}
 body{font-size:11pt}
}
"""


def style_sheet() -> str:
    """Return the CSS of the page; print is always light."""
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    return f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}\n{dark}{_PAGE}{_TABLES}"


def _variables(colours: str) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in zip(_NAMES, colours.split(), strict=True))
