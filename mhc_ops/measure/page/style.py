"""How a page looks: light and dark, on a phone, on paper. Colours of providers are the same everywhere."""

from .markup import slug

# light, dark
COLOURS = {
    "triton": ("#2563eb", "#6ea1ff"),
    "tilelang": ("#0d9488", "#3fcdb8"),
    "hip": ("#7c3aed", "#b39bff"),
    "torch.compile": ("#d97706", "#f0ac52"),
    "eager": ("#7b8696", "#9aa4b2"),
    "Liger": ("#d6336c", "#f27ea8"),
    "TileKernels": ("#3f8f2f", "#7fcf6d"),
    "fla": ("#a8551f", "#e09a6a"),
    "causal-conv1d": ("#0e7490", "#67c7dd"),
}
UNKNOWN = ("#6b7280", "#a1a8b3")
COPY = ("#475569", "#aab6c5")

STYLE = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#17202e;--soft:#5a6676;--rule:#dfe3e9;--bad:#c62828;
--good:22 163 74;--worse:220 60 50;--p:#6b7280}
@media (prefers-color-scheme:dark){:root{--paper:#0f141b;--card:#171e28;--ink:#e7ecf3;--soft:#9aa6b6;--rule:#2a3441;
--bad:#ff7b72;--good:74 222 128;--worse:255 110 100}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums}
header,nav,main,.legend{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:32px}
h1{font-size:30px;line-height:1.15;margin:0;letter-spacing:-.02em}
header>p{margin:6px 0 20px;color:var(--soft)}
h2{font-size:22px;margin:44px 0 12px;letter-spacing:-.01em}
h3{font-size:17px;margin:26px 0 10px}
h4{font-size:14px;margin:0 0 8px}
h5{margin:12px 0 2px;color:var(--soft)}
h5 .direction{grid-column:span 2;font-size:12px;font-weight:600;text-align:left}
section{scroll-margin-top:56px}
a{color:inherit;text-decoration-color:var(--rule);text-underline-offset:3px}
small{color:var(--soft);font-weight:400;font-size:12.5px}
.note{color:var(--soft);max-width:82ch}
.bad{color:var(--bad)}
.none{color:var(--soft);opacity:.6}
.unit{color:var(--soft);font-size:.86em;font-weight:400}
.tiles{display:flex;flex-wrap:wrap;gap:10px}
.tiles .double{flex:2 1 300px}
.tiles div{flex:1 1 150px;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.tiles b{display:block;font-size:23px;letter-spacing:-.02em}
.tiles span{font-size:12.5px;color:var(--soft)}
.tiles b .unit{font-size:14px}
.tiles ul{list-style:none;margin:0;padding:0;display:grid;grid-template-columns:1fr 1fr;gap:2px 12px;font-size:13px}
.tiles li b{display:inline;font-size:16px}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding-top:20px;font-size:14px}
.legend{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:6px;padding-top:10px;padding-bottom:10px;
background:var(--paper)}
.chip{display:inline-flex;align-items:center;gap:6px;font-size:13px;padding:3px 10px;border:1px solid var(--rule);
border-radius:99px;background:var(--card);cursor:pointer}
.chip input{position:absolute;opacity:0;pointer-events:none}
.chip:has(:focus-visible){outline:2px solid var(--ink)}
.chip:has(input:not(:checked)){opacity:.45;text-decoration:line-through}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:3px;background:var(--p);margin-right:.4em}
.chip .dot{margin:0}
.cards,.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(var(--least),100%),1fr));gap:14px}
.cards{--least:460px}
.charts{--least:330px}
@media (min-width:1100px){.cards:has(>:nth-child(3):last-child){--least:330px}}
.card,.overview,figure{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:14px 16px;
margin:0}
.group{position:relative}
.bar{display:grid;grid-template-columns:94px 1fr 68px 44px 52px;align-items:center;gap:6px;font-size:12.5px;
line-height:1.5}
h5.bar{font-size:11px;font-weight:400}
h5.bar span{justify-self:end;white-space:nowrap}
h5.bar .direction{justify-self:start}
.bar.p-copy .figure:nth-child(4){grid-column:span 2}
.bar.p-copy .figure:nth-child(5){display:none}
.bar .name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.bar .time,.bar .figure{text-align:right;white-space:nowrap}
.bar .figure{color:var(--soft)}
.track{height:11px;position:relative;display:block;background:color-mix(in srgb,var(--rule) 45%,transparent);
border-radius:2px}
.track::after{content:"";position:absolute;left:calc(var(--floor)*100%);top:-4px;bottom:-4px;
border-left:1px dashed var(--soft)}
.fill{display:block;height:100%;width:max(2px,calc(var(--share)*100%));border-radius:2px;background:linear-gradient(90deg,
var(--p) calc(var(--solid,1)*100%),color-mix(in srgb,var(--p) 42%,var(--card)) calc(var(--solid,1)*100%))}
.overview{padding:4px 16px 14px}
.close{display:grid;grid-template-columns:190px repeat(3,1fr);gap:6px 22px;padding:12px 0;
border-top:1px solid var(--rule)}
.close:first-child{border-top:0}
.close h3{margin:0;font-size:15px;overflow-wrap:anywhere}
.close small{display:block}
.close h4{font-size:12px;color:var(--soft);font-weight:600;margin:0 0 2px}
.to-copy{--floor:1}
.to-copy .bar{grid-template-columns:94px 1fr 40px}
.cut .fill{mask:linear-gradient(115deg,#000 calc(100% - 18px),transparent 0 calc(100% - 13px),#000 0)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:12px;margin:10px 0}
table{border-collapse:collapse;width:100%;font-size:13px}
caption{text-align:left;padding:10px 12px 4px;color:var(--soft)}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}
thead th{vertical-align:bottom;font-weight:600;border-top:0}
th:first-child{text-align:left;font-weight:500;position:sticky;left:0;background:var(--card);z-index:1}
th small{margin-left:6px}
.trio{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(46px,1fr);gap:2px;text-align:right}
.trio span{padding:1px 4px;border-radius:4px}
.win{background:rgb(var(--good)/calc(var(--tint)*.36))}
.loss{background:rgb(var(--worse)/calc(.08 + var(--tint)*.7))}
th .trio{font-weight:400;font-size:11.5px;color:var(--soft)}
details{margin:10px 0}
summary{cursor:pointer;padding:4px 0;color:var(--soft)}
summary:hover{color:var(--ink)}
details .cards{margin-top:8px}
figcaption{font-size:14px;margin-bottom:6px}
figcaption small{display:block}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:var(--soft)}
svg .axis{font-weight:600}
svg .grid{stroke:var(--rule)}
polyline{fill:none;stroke:var(--p);stroke-width:2}
polyline.p-copy{stroke-dasharray:4 4;stroke-width:1.5}
circle{fill:var(--p);stroke:var(--card);stroke-width:1.5}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px 20px;margin:0 0 60px}
dt{color:var(--soft);font-size:12.5px}
dd{margin:0;overflow-wrap:anywhere}
ul{padding-left:20px}
@media screen and (max-width:760px){
header,nav,main,.legend{padding-left:14px;padding-right:14px}
h1{font-size:25px}
.close{grid-template-columns:1fr}
.legend{flex-wrap:nowrap;overflow-x:auto}
.bar{grid-template-columns:82px 1fr 56px 36px 46px;gap:4px;font-size:11.5px}
h5.bar{font-size:10px}
.to-copy .bar{grid-template-columns:82px 1fr 36px}
.card,.overview{padding-left:12px;padding-right:12px}
th,td{padding:5px 8px}
th:first-child{white-space:normal;min-width:120px;max-width:150px}
th small{margin-left:0;display:block}
}
@media print{
:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;--bad:#b00020;
--good:22 163 74;--worse:220 60 50}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
@page{margin:12mm}
body{font-size:11px}
header,main,.legend{padding-left:0;padding-right:0}
h2{font-size:17px;margin-top:20px}
h3{font-size:13px;margin-top:12px}
small,.tiles span{font-size:9.5px}
.tiles b{font-size:17px}
.tiles li b{font-size:11px}
.tiles div,.card,figure{padding:8px 10px}
.tiles div{flex-basis:80px}
.tiles .double{flex-basis:160px}
.bar{font-size:9px;gap:4px;grid-template-columns:64px 1fr 46px 30px 36px}
h5.bar{font-size:8px}
.to-copy .bar{grid-template-columns:64px 1fr 26px}
.close{grid-template-columns:104px repeat(3,1fr);gap:4px 12px;padding:7px 0}
.close h3{font-size:11px;break-after:auto}
.track{height:7px}
nav,.legend{position:static}
nav{display:none}
.card,figure,.close,tr,.tiles div,.group{break-inside:avoid}
h2,h3,summary{break-after:avoid}
details::details-content{content-visibility:visible;display:block;height:auto}
.wide{overflow:visible;border:0}
table{font-size:9px}
th,td{padding:2px 4px}
.trio{grid-auto-columns:minmax(30px,1fr);gap:1px}
.trio span{padding:0 1px}
.cards{grid-template-columns:1fr 1fr}
.charts{grid-template-columns:1fr 1fr 1fr}
th:first-child{position:static;white-space:normal}
th small{font-size:8px}
}
"""


def provider_rules(providers: list[str]) -> str:
    """Its colour; and its bars, lines and points away when its name is switched off."""
    rules = []
    for name in [*providers, "copy"]:
        light, dark = COPY if name == "copy" else COLOURS.get(name, UNKNOWN)
        p = slug(name)
        rules.append(
            f".p-{p}{{--p:{light}}}@media screen and (prefers-color-scheme:dark){{.p-{p}{{--p:{dark}}}}}"
            f"body:has(#show-{p}:not(:checked)) :is(.bar,polyline,circle).p-{p}{{display:none}}"
        )
    return "".join(rules)
