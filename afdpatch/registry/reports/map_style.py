"""The style sheet of the chain's page: light and dark, and readable at a phone's width."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5a6475; --line: #cfd6e1; --page: #f6f7f9; --card: #ffffff;
  --mark: #2459c4; --mark-soft: #e8effc; --ok: #1c7a3d; --bad: #b42318; --bad-soft: #fdecea;
  --a: #8a4b08; --f: #5b3bb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --soft: #9fabbd; --line: #384252; --page: #12161d;
  --card: #1b212b; --mark: #86b0ff; --mark-soft: #1d2b47; --ok: #6fd08f; --bad: #ff8f85; --bad-soft: #40201d;
  --a: #f0b46c; --f: #bda5ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.05rem; margin: 0; }
h3 { font-size: 1.05rem; margin: 0; }
p { margin: .35rem 0; }
a { color: var(--mark); text-decoration: none; } a:hover, a:focus { text-decoration: underline; }
code { font: .84em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.facts .verdict { margin: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .1rem 1.5rem; margin: 1rem 0;
  padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.facts dt { color: var(--soft); font-size: .82rem; margin-top: .3rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
nav { display: grid; grid-template-columns: max-content 1fr; gap: .5rem 1rem; align-items: start; margin: 1.2rem 0; }
nav p { margin: .2rem 0 0; font-size: .86rem; color: var(--soft); }
nav ol { display: flex; flex-wrap: wrap; gap: .35rem .5rem; margin: 0; padding: 0; list-style: none; }
nav li { display: flex; flex-wrap: wrap; gap: .25rem; }
nav li:not(:first-child)::before { content: "→"; color: var(--soft); }
.chip { border: 1px solid var(--line); border-radius: 1rem; padding: .05rem .6rem; background: var(--card);
  color: var(--ink); font-size: .88rem; } .chip.side { border-style: dashed; }
.chip.hooked { border-color: var(--mark); } .chip.broken { border-color: var(--bad); }
.chip i { font-style: normal; font-weight: 600; color: var(--mark); } .chip.broken i { color: var(--bad); }
.box:target { outline: 2px solid var(--mark); outline-offset: 2px; }
.process { margin-top: 1.6rem; border: 1px solid var(--line); border-radius: .9rem; padding: .9rem 1rem 1.1rem; }
.process > header { display: flex; flex-wrap: wrap; gap: 0 .8rem; align-items: baseline; margin-bottom: .8rem; }
.process > header p { margin: 0; font-size: .9rem; }
.arrow { display: block; margin: 0 auto; height: 1.5rem; width: 1rem; color: var(--soft); }
.between { margin-bottom: -1.6rem; }
.box { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem .8rem; }
.box.hooked { border-color: var(--mark); box-shadow: inset .25rem 0 0 var(--mark); }
.box.broken { border-color: var(--bad); box-shadow: inset .25rem 0 0 var(--bad); }
.box > p { margin: .1rem 0 .4rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .7rem;
  align-items: start; margin: 0 0 0 1rem; padding: .7rem 0 0 1.1rem; border-left: 2px dotted var(--line); }
ul { list-style: none; margin: .3rem 0 0; padding: 0; }
.facets { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: .4rem 1.5rem; }
.places li { display: flex; flex-wrap: wrap; gap: 0 .7rem; align-items: baseline; line-height: 1.45; }
.places li > code { font-weight: 600; }
.absent { color: var(--bad); }
.roles { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .6rem; margin: .25rem 0 0; font-size: .9rem;
  align-content: start; }
.roles dt { font-weight: 600; } .roles dd { margin: 0; }
.role-0 { color: var(--a); } .role-1 { color: var(--f); }
.patch { margin-top: .5rem; background: var(--mark-soft); border-radius: .45rem; padding: .35rem .6rem; }
.patch.bad { background: var(--bad-soft); }
.patch summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: 0 .6rem; align-items: baseline; }
.patch summary::before { content: "▸"; color: var(--soft); } .patch[open] summary::before { content: "▾"; }
.patch summary::-webkit-details-marker { display: none; }
.patch b { color: var(--mark); } .patch.bad b { color: var(--bad); }
.tag { font-size: .82rem; color: var(--soft); }
.verdict { font-size: .82rem; font-weight: 600; margin-left: auto; color: var(--bad); }
.verdict.ok { color: var(--ok); }
.relied { font-size: .86rem; margin: .5rem 0 0; }
footer { margin-top: 2rem; font-size: .9rem; }
@media (max-width: 34rem) { nav { grid-template-columns: 1fr; gap: .15rem; } nav p { margin-top: .4rem; }
  main { padding: 1.2rem .6rem 3rem; } .process { padding: .7rem .6rem .8rem; }
  .beside { margin-left: .3rem; padding-left: .7rem; } .box { padding: .6rem .7rem; } h1 { font-size: 1.4rem; } }
@media print { .patch > * { display: block; } body { background: none; } }
"""
