"""How a figure looks on a page: tints over whatever ground there is, letters in its own colour."""

STYLE = """\
.cutaway-figure{color:inherit;font-size:14px;line-height:1.35}
.cutaway-figure h3{font-size:1.1em;margin:.4em 0}
.cutaway-figure div{overflow-x:auto;margin:.6em 0}
.cutaway-figure table{border-collapse:collapse;border:0;font:12px ui-monospace,monospace;color:inherit}
.cutaway-figure caption{text-align:left;font:600 13px system-ui,sans-serif;padding:.2em 0;color:inherit}
.cutaway-figure small{font-weight:400;opacity:.75}
.cutaway-figure :is(td,th){padding:1px 5px;border:0;text-align:right;white-space:pre;background:none;color:inherit}
.cutaway-figure tbody th,.cutaway-figure table.bars td:last-child{text-align:left}
.cutaway-figure th{font-weight:400;opacity:.8}
.cutaway-figure td i{font-style:normal;opacity:.75}
.cutaway-figure table.bars td:nth-of-type(2){width:22em}
.cutaway-figure b{display:block;height:.8em;background:#2272dc}
.cutaway-figure b.below{background:repeating-linear-gradient(45deg,#9d44c8 0 3px,#c79ae0 3px 5px)}
.cutaway-figure ruby{padding:0 3px;margin:1px;border-radius:3px;white-space:pre}
.cutaway-figure ul{margin:.4em 0;padding-left:1.2em;opacity:.8;font-size:.92em}
.cutaway-figure .p1{background:rgb(34 114 220/0.12)}
.cutaway-figure .p2{background:rgb(34 114 220/0.22)}
.cutaway-figure .p3{background:rgb(34 114 220/0.33)}
.cutaway-figure .p4{background:rgb(34 114 220/0.44)}
.cutaway-figure .p5{background:rgb(34 114 220/0.56)}
.cutaway-figure .n1{background:rgb(157 68 200/0.12)}
.cutaway-figure .n2{background:rgb(157 68 200/0.22)}
.cutaway-figure .n3{background:rgb(157 68 200/0.33)}
.cutaway-figure .n4{background:rgb(157 68 200/0.44)}
.cutaway-figure .n5{background:rgb(157 68 200/0.56)}
"""
