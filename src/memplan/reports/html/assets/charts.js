// The page's pictures, by plotly. Each kind of chart is one function of `draw`, from an element and its data.
"use strict";
(() => {
  const { charts, looks } = JSON.parse(document.getElementById("data").textContent);
  const look = Object.fromEntries(looks.map((one) => [one.cause, one]));
  const order = looks.map((one) => one.cause);
  const wide = () => innerWidth > 600;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  // plotly reads tags and entities in texts: a name is never one
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  function bytes(number) {
    const size = Math.abs(Math.round(number));
    const sign = number < 0 ? "-" : "";
    if (size < 1024) return `${sign}${size} B`;
    let tenths = 0;
    let power = 0;
    do {
      power += 1;
      tenths = Math.floor((20 * size + 1024 ** power) / (2 * 1024 ** power));
    } while (tenths >= 10240 && power < 4);
    return `${sign}${Math.floor(tenths / 10)}.${tenths % 10} ${UNITS[power]}`;
  }
  const seconds = (number) => (Math.abs(number) >= 0.9995 ? `${number.toFixed(1)} s` : `${(1000 * number).toFixed(1)} ms`);

  function sizes(most, count = 6, least = 0) { // ticks of an axis of bytes, at round numbers of a unit
    const unit = 1024 ** Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(most - least, 1)) / 10)));
    const steps = [0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500];
    const step = Math.max(1, unit * (steps.find((one) => (most - least) / (one * unit) <= count) ?? 1000));
    const vals = [];
    for (let at = Math.ceil(least / step) * step; at <= most * 1.001; at += step) vals.push(at);
    const text = (value) => { // exact: a tick is at its number
      const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
      return `${Number((value / 1024 ** power).toFixed(2))} ${UNITS[power]}`;
    };
    return { tickmode: "array", tickvals: vals, ticktext: vals.map((one) => (one === 0 ? "0" : text(one))), range: [0, most * 1.08 || 1] };
  }
  const places = { zeroline: false, showgrid: false }; // of an axis that counts bars
  const theme = () => ({
    font: { color: colour("text"), size: 12 },
    "xaxis.gridcolor": colour("dim") + "40", "yaxis.gridcolor": colour("dim") + "40",
    "xaxis.zerolinecolor": colour("dim"), "yaxis.zerolinecolor": colour("dim"),
    "hoverlabel.bgcolor": colour("back"), "hoverlabel.font.color": colour("text"), "hoverlabel.bordercolor": colour("dim"),
  });
  function layout(extra) {
    const { xaxis, yaxis, ...rest } = extra;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 12 },
      hoverlabel: { bgcolor: colour("back"), bordercolor: colour("dim"), font: { color: colour("text") }, align: "left" },
      margin: { l: wide() ? 74 : 58, r: 12, t: 28, b: 40 }, height: 380, showlegend: false,
      xaxis: { gridcolor: colour("dim") + "40", zerolinecolor: colour("dim"), ...xaxis },
      yaxis: { gridcolor: colour("dim") + "40", zerolinecolor: colour("dim"), fixedrange: true, ...yaxis }, ...rest,
    };
  }
  const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const pattern = (cause) => ({ shape: look[cause].pattern, bgcolor: look[cause].colour, fgcolor: "#ffffff", size: 6, solidity: 0.3 });
  const fill = (cause) => ({ color: look[cause].colour, ...(look[cause].pattern ? { pattern: pattern(cause) } : {}) });
  const FREE = ""; // of a block that no storage is in
  const label = (cause) => look[cause]?.label ?? (cause === FREE ? "free" : cause);

  // The key of a cause has its pattern, too: causes of one hue differ by it
  const stripes = (angle) => `repeating-linear-gradient(${angle}deg, transparent 0 2px, #fff 2px 3px)`;
  const DRAWN = {
    "/": stripes(135), "\\": stripes(45), "-": stripes(0), "|": stripes(90), x: `${stripes(45)}, ${stripes(135)}`,
    ".": "radial-gradient(#fff 1px, transparent 1.2px) 0 0 / 4px 4px",
  };
  const swatch = (cause) => [DRAWN[look[cause].pattern], look[cause].colour].filter(Boolean).join(", ");

  function named(cause, text) {
    const span = document.createElement("span");
    const mark = document.createElement("i");
    mark.className = cause === FREE ? "key free" : "key";
    if (look[cause]) mark.style.background = swatch(cause);
    span.append(mark, text);
    return span;
  }
  function readout(figure, head, parts) {
    const bold = document.createElement("b");
    bold.textContent = head;
    const shown = parts.filter(([, value]) => value).map(([cause, value]) => named(cause, `${label(cause)} ${bytes(value)}`));
    figure.querySelector(".readout").replaceChildren(bold, ...shown);
  }
  const keys = (figure, causes) => figure.querySelector(".readout").replaceChildren(...causes.map((cause) => named(cause, label(cause))));

  const PHASES = ["forward", "backward", "optimizer"];
  const SHORT = { forward: "fwd", backward: "bwd", optimizer: "opt" };
  // Several steps on one axis: each phase is as wide as in the others
  function positions(one, together) {
    if (!together) return one.ticks;
    const at = one.ticks.map(() => null);
    for (const [phase, , start, end] of one.spans)
      one.ticks.forEach((tick, place) => {
        const column = PHASES.indexOf(phase);
        if (column >= 0 && tick >= start && tick <= end) at[place] = column + (tick - start) / Math.max(1, end - start);
      });
    return at;
  }
  function opText(one, place) {
    if (!one.opRows.length) return `event ${one.ticks[place]}`;
    const row = one.opRows[one.ops[place]];
    if (!row) return "before the first op";
    const [name, layer, where, phase, step] = row;
    return `${name}${layer ? ` of ${layer}` : ""}${where ? ` (${where})` : ""}, ${step < 0 ? "building" : `${phase} ${step + 1}`}`;
  }
  function phases(series, width, together) { // bands, and their names where there is room
    const shapes = [];
    const notes = [];
    const last = series.at(-1);
    const spans = together ? PHASES.map((phase, at) => [phase, 0, at, at + 1]).filter(([phase]) => series.some((one) => one.spans.some((span) => span[0] === phase))) : last.spans;
    const whole = together ? spans.length : last.ticks.at(-1) - last.ticks[0] || 1;
    spans.forEach(([phase, step, start, end], place) => {
      if (place % 2) shapes.push({ type: "rect", xref: "x", yref: "paper", x0: start, x1: end, y0: 0, y1: 1, fillcolor: "#8c8c8c", opacity: 0.13, line: { width: 0 }, layer: "below" });
      const names = [phase, SHORT[phase] ?? phase].map((one) => (together || step < 0 ? one : `${one} ${step + 1}`));
      const name = names.find((one) => (width * (end - start)) / whole > 7 * one.length + 4);
      if (name) notes.push({ text: name, x: (start + end) / 2, y: 1.02, yref: "paper", yanchor: "bottom", showarrow: false });
    });
    return { shapes, notes };
  }
  function rule(value, text, shapes, notes) { // a horizontal line
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { dash: "dash", width: 1.5, color: colour("bad") } });
    notes.push({ name: "rule", text: `${text} ${bytes(value)}`, xref: "paper", x: 0.005, xanchor: "left", y: value, yanchor: "bottom", showarrow: false, font: { color: colour("bad") } });
  }

  const draw = {};
  draw.time = (figure, plot, data) => {
    const together = data.series.length > 1;
    const last = data.series.at(-1);
    const xs = data.series.map((one) => positions(one, together));
    const x = xs.at(-1);
    const traces = order.filter((cause) => last.causes[cause]).map((cause) => ({
      x, y: last.causes[cause], name: label(cause), meta: cause, stackgroup: "causes", mode: "lines", line: { width: 0, shape: "hv" },
      fillcolor: look[cause].colour, ...(look[cause].pattern ? { fillpattern: pattern(cause) } : {}),
      hoverinfo: "skip",
    }));
    if (last.reserved.length) traces.push({ x, y: last.reserved, name: "reserved", meta: "reserved", mode: "lines", line: { shape: "hv", width: 1.5, dash: "dot", color: "#8c8c8c" }, hoverinfo: "skip" });
    data.series.slice(0, -1).forEach((one, place) => traces.push({ x: xs[place], y: one.allocated, name: one.name, meta: one.name, mode: "lines", line: { shape: "hv", width: 2, color: "#8c8c8c" }, text: one.ticks.map((_, at) => `${one.name}: ${bytes(one.allocated[at])}<br>${safe(opText(one, at))}`), hovertemplate: "%{text}<extra></extra>" }));
    const total = traces.length;
    traces.push({ x, y: last.allocated, name: last.name || "allocated", meta: "allocated", mode: "lines", line: { shape: "hv", width: 1.5, color: colour("text") }, text: last.ticks.map((_, at) => `${last.name ? `${last.name}: ` : ""}${bytes(last.allocated[at])}<br>${safe(opText(last, at))}`), hovertemplate: "%{text}<extra></extra>" });
    const { shapes, notes } = phases(data.series, plot.clientWidth - (wide() ? 86 : 70), together);
    let most = Math.max(...data.series.map((one) => Math.max(...one.allocated, ...(one.reserved.length ? one.reserved : [0]))));
    for (const [value, text] of [[data.capacity, "card"], [data.budget, "budget"]])
      if (value && value < 2 * most) {
        rule(value, text, shapes, notes);
        most = Math.max(most, value);
      }
    const peak = last.allocated.indexOf(Math.max(...last.allocated.filter((_, at) => x[at] !== null)));
    notes.push({ x: x[peak], y: last.allocated[peak], text: `peak ${bytes(last.allocated[peak])}`, showarrow: true, arrowhead: 2, ax: x[peak] > (x[0] + x.at(-1)) / 2 ? -60 : 60, ay: -18, arrowcolor: colour("text"), bgcolor: colour("back"), bordercolor: colour("dim") });
    const axis = together ? { tickvals: [], range: [0, Math.ceil(Math.max(...xs.flat().filter((at) => at !== null)))] } : { title: { text: "allocations and frees, in order" }, range: [x[0], x.at(-1)] };
    traces.forEach((trace) => (trace.showlegend = together && !trace.stackgroup));
    const names = together ? { showlegend: true, legend: { orientation: "h", y: -0.02, yanchor: "top" } } : {};
    Plotly.newPlot(plot, traces, layout({ ...names, hovermode: "x", dragmode: "zoom", xaxis: axis, yaxis: sizes(most), shapes, annotations: notes }), config);

    const whole = [...plot.layout.xaxis.range]; // plotly changes the one that it was given
    let at = peak;
    const show = (place) => {
      at = place;
      readout(figure, `${bytes(last.allocated[at])}: ${opText(last, at)}.`, order.map((cause) => [cause, last.causes[cause]?.[at]]));
    };
    show(peak);
    plot.on("plotly_hover", (event) => {
      const point = event.points.find((one) => one.curveNumber === total);
      if (point) show(point.pointNumber);
    });
    const visible = (place) => {
      const [from, to] = plot.layout.xaxis.range;
      if (x[place] < from || x[place] > to) {
        const half = (to - from) / 2;
        Plotly.relayout(plot, { "xaxis.range": [x[place] - half, x[place] + half] });
      }
      Plotly.Fx.hover(plot, [{ curveNumber: total, pointNumber: place }]);
      show(place);
    };
    const zoom = (factor) => {
      const [from, to] = plot.layout.xaxis.range;
      Plotly.relayout(plot, { "xaxis.range": [x[at] - (x[at] - from) * factor, x[at] + (to - x[at]) * factor] });
    };
    plot.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 20 : 1;
      const go = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: x.length - 1, p: peak }[event.key];
      if (go !== undefined) visible(Math.min(x.length - 1, Math.max(0, go)));
      else if (event.key === "+") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "Escape") Plotly.relayout(plot, { "xaxis.range": [...whole] });
      else return;
      event.preventDefault();
    });
  };

  draw.layers = (figure, plot, data) => {
    const column = { saved: 3, peak: 4 };
    const buttons = [...figure.querySelectorAll(".controls button")];
    const values = (key) => data.nodes.map((node) => node[column[key]]);
    let key = buttons[0].dataset.key;
    const root = "\u0000"; // the id of all: a path is never it
    const id = (path) => (path === "" ? root : path);
    const most = 400; // slices that are drawn at once: as many levels as have no more
    const levels = [0, 0, 0, 0, 0, 0];
    for (const node of data.nodes) levels[node[2] === null ? 0 : Math.min(5, node[0].split(".").length)] += 1;
    let shown = 2;
    while (shown < 5 && levels.slice(0, shown + 1).reduce((sum, count) => sum + count) <= most) shown += 1;
    const texts = () => data.nodes.map((node) => `${safe(node[0] || "all")}<br>${bytes(node[column[key]])}`);
    Plotly.newPlot(plot, [{
      type: "icicle", ids: data.nodes.map((node) => id(node[0])), labels: data.nodes.map((node) => safe(node[1])),
      parents: data.nodes.map((node) => (node[2] === null ? "" : id(node[2]))), values: values(key), branchvalues: "total",
      text: data.nodes.map((node) => bytes(node[column[key]])), hovertext: texts(), hovertemplate: "%{hovertext}<extra></extra>", textinfo: "label+text", textfont: { size: 12 },
      marker: { colors: values(key), colorscale: "Cividis", reversescale: true, cmin: 0 }, tiling: { orientation: "v" }, maxdepth: shown, pathbar: { visible: true }, sort: false,
    }], layout({ height: 420, margin: { l: 4, r: 4, t: 28, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } }), config);
    const open = (path) => {
      Plotly.restyle(plot, { level: id(path) }).then(() => tell(path));
    };
    const tell = (path) => {
      const node = data.nodes.find((one) => one[0] === path);
      if (node) readout(figure, `${path || "all"}: saves ${bytes(node[3])}, holds ${bytes(node[4])} at the peak.`, []);
    };
    tell("");
    plot.on("plotly_icicleclick", (event) => tell(event.nextLevel === root || event.nextLevel === undefined ? "" : event.nextLevel));
    buttons.forEach((button) => button.addEventListener("click", () => {
      key = button.dataset.key;
      buttons.forEach((one) => one.setAttribute("aria-pressed", one === button));
      Plotly.restyle(plot, { values: [values(key)], text: [data.nodes.map((node) => bytes(node[column[key]]))], hovertext: [texts()], "marker.colors": [values(key)] });
    }));
    for (const button of figure.closest("article").querySelectorAll(".layer"))
      button.addEventListener("click", () => {
        open(data.nodes.some((node) => node[0] === button.dataset.layer) ? button.dataset.layer : "");
        figure.scrollIntoView({ block: "nearest" });
      });
  };

  draw.allocator = (figure, plot, data) => {
    const causes = [...order, FREE].filter((cause) => data.segments.some((one) => one.blocks.some((block) => block[2] === cause)));
    const traces = causes.map((cause) => {
      const rows = data.segments.flatMap((one, place) => one.blocks.filter((block) => block[2] === cause).map((block) => [place, block]));
      return {
        type: "bar", orientation: "h", width: 0.8, name: label(cause), meta: cause || "free", y: rows.map(([place]) => place), x: rows.map(([, block]) => block[1]), base: rows.map(([, block]) => block[0]),
        marker: cause ? fill(cause) : { color: "rgba(140,140,140,0.12)", line: { width: 1, color: "#8c8c8c" } },
        text: rows.map(([place, block]) => `${bytes(block[1])} ${cause ? label(cause) : ""}<br>${safe(block[3])}<br>segment ${place + 1}: ${bytes(data.segments[place].size)}, ${data.segments[place].name}`),
        textposition: "none", hovertemplate: "%{text}<extra></extra>",
      };
    });
    const most = Math.max(...data.segments.map((one) => one.size));
    const height = 60 + Math.max(80, 14 * data.segments.length);
    keys(figure, causes);
    Plotly.newPlot(plot, traces, layout({ barmode: "overlay", bargap: 0.25, height, hovermode: "closest", xaxis: sizes(most, wide() ? 6 : 3), yaxis: { ...places, autorange: "reversed", showticklabels: false, title: { text: "segments" } }, margin: { l: 34, r: 12, t: 8, b: 30 } }), config);
  };

  const bars = (causes, names) => order.filter((cause) => causes[cause]).map((cause) => ({
    type: "bar", orientation: "h", y: names.map((_, place) => place), x: causes[cause], name: label(cause), meta: cause, marker: fill(cause),
    text: causes[cause].map((value, place) => `${safe(names[place])}<br>${label(cause)}: ${bytes(value)}`), textposition: "none", hovertemplate: "%{text}<extra></extra>",
  }));
  // Names cut to a length: of several, what they begin with together goes first
  function shortened(names, most) {
    let same = names.length > 1 ? Math.min(...names.map((name) => name.length)) : 0;
    while (same && !names.every((name) => name.slice(0, same) === names[0].slice(0, same))) same -= 1;
    const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
    return names.map((name) => (name.length > most && same > 8 ? `…${cut(name.slice(same), most - 1)}` : cut(name, most)));
  }
  draw.beside = (figure, plot, data) => {
    const totals = data.names.map((_, place) => Object.values(data.causes).reduce((sum, column) => sum + column[place], 0));
    const ticks = shortened(data.names, wide() ? 40 : 16).map(safe);
    keys(figure, order.filter((cause) => data.causes[cause]));
    Plotly.newPlot(plot, bars(data.causes, data.names), layout({ barmode: "stack", height: 40 + 40 * data.names.length, hovermode: "closest", xaxis: { ...sizes(Math.max(...totals), wide() ? 6 : 3), fixedrange: true }, yaxis: { ...places, autorange: "reversed", tickvals: data.names.map((_, place) => place), ticktext: ticks, automargin: true }, margin: { l: 40, r: 12, t: 8, b: 30 } }), config);
  };

  function slider(box, name, texts, at, moved) {
    const line = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: texts.length - 1, step: 1, value: at });
    const out = document.createElement("output");
    const tell = () => {
      out.textContent = texts[input.value];
      input.setAttribute("aria-valuetext", texts[input.value]);
    };
    input.addEventListener("input", () => {
      tell();
      moved(Number(input.value));
    });
    tell();
    const text = document.createElement("span");
    text.textContent = name;
    line.append(text, input, out);
    box.append(line);
  }
  function sliders(figure, plot) {
    const box = document.createElement("div");
    box.className = "sliders";
    plot.before(box);
    return box;
  }
  draw.batch = (figure, plot, data) => { // the peak is the highest of lines in the batch
    const peak = (batch) => Math.round(Math.max(...data.lines.map(([fixed, slope]) => fixed + slope * batch)));
    const batches = [...new Set([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].concat(data.batches))].sort((a, b) => a - b);
    const show = (place) => readout(figure, `batch ${batches[place]}: ${bytes(peak(batches[place]))} peak`, []);
    slider(sliders(figure, plot), "batch", batches.map(String), batches.indexOf(data.batch), (place) => {
      show(place);
      Plotly.restyle(plot, { x: [[batches[place]]], y: [[peak(batches[place])]] }, [2]);
    });
    const near = batches.filter((batch) => batch <= 8 * data.batch);
    const most = peak(near.at(-1));
    Plotly.newPlot(plot, [
      { x: near, y: near.map(peak), mode: "lines", name: "predicted", line: { color: colour("link") }, hovertemplate: near.map((batch) => `batch ${batch}: ${bytes(peak(batch))}<extra></extra>`) },
      { x: data.batches, y: data.peaks, mode: "markers", name: "recorded", marker: { symbol: "square", size: 8, color: look.weight.colour }, hovertemplate: data.batches.map((batch, place) => `recorded at batch ${batch}: ${bytes(data.peaks[place])}<extra></extra>`) },
      { x: [data.batch], y: [peak(data.batch)], mode: "markers", name: "chosen", marker: { size: 14, symbol: "circle-open", line: { width: 3 }, color: look.saved.colour }, hoverinfo: "skip" },
    ], layout({ height: 260, xaxis: { title: { text: "batch" }, fixedrange: true }, yaxis: sizes(most) }), config);
    show(batches.indexOf(data.batch));
  };

  draw.sweep = (figure, plot, data) => {
    const at = [...(data.rows.find((row) => row.parts) ?? data.rows[0]).values];
    const same = (row, place) => row.values.every((value, axis) => axis === place || value === at[axis]);
    const current = () => data.rows.find((row) => row.values.every((value, axis) => value === at[axis]));
    const main = data.axes.reduce((best, one, place) => (one.texts.length > data.axes[best].texts.length ? place : best), 0);
    const box = sliders(figure, plot);
    data.axes.forEach((axis, place) => slider(box, axis.name, axis.texts, at[place], (value) => {
      at[place] = value;
      show();
    }));
    const most = Math.max(1, ...data.rows.map((row) => row.peak_high ?? 0));
    function show() {
      const row = current();
      const names = data.axes[main].texts;
      const along = names.map((_, value) => data.rows.find((one) => same(one, main) && one.values[main] === value));
      const traces = order.filter((cause) => data.rows.some((one) => one.parts?.[cause])).map((cause) => ({
        type: "bar", x: names.map((_, place) => place), y: along.map((one) => one?.parts?.[cause] ?? null), name: label(cause), meta: cause,
        marker: { ...fill(cause), opacity: names.map((_, place) => (place === at[main] ? 1 : 0.45)) },
        text: along.map((one, place) => `${safe(data.axes[main].name)} ${safe(names[place])}<br>${label(cause)}: ${bytes(one?.parts?.[cause] ?? 0)}<br>peak ${bytes(one?.peak ?? 0)}`), textposition: "none", hovertemplate: "%{text}<extra></extra>",
      }));
      const shapes = [];
      const notes = [];
      if (data.capacity && data.capacity < 2 * most) rule(data.capacity, "card", shapes, notes);
      Plotly.react(plot, traces, layout({ barmode: "stack", height: 380, hovermode: "closest", xaxis: { ...places, tickvals: names.map((_, place) => place), ticktext: names.map(safe), title: { text: safe(data.axes[main].name) }, fixedrange: true }, yaxis: sizes(Math.max(most, shapes.length ? data.capacity : 0)), shapes, annotations: notes }), config);
      const place = data.axes.map((axis, number) => `${axis.name} ${axis.texts[at[number]]}`).join(", ");
      if (!row) readout(figure, `${place}: not recorded`, []);
      else if (!row.parts) readout(figure, `${place}: failed: ${row.reason}`, []);
      else readout(figure, `${place}: ${bytes(row.peak)} peak${row.peak_high > row.peak ? ` (to ${bytes(row.peak_high)})` : ""}`, order.map((cause) => [cause, row.parts[cause]]));
    }
    show();
  };

  draw.frontier = (figure, plot, data) => {
    const groups = [["planned", "circle", look.weight.colour], ["planned, lossy", "diamond", look.temporary.colour], ["without a plan", "square", "#8c8c8c"], ["this plan", "star", look.saved.colour], ["measured", "triangle-up", look.optimizer_state.colour], ["fits", "circle", look.weight.colour], ["does not fit", "x", "#8c8c8c"]];
    const traces = groups.map(([name, symbol, colour_]) => {
      const points = data.points.filter((one) => one.group === name);
      return { x: points.map((one) => one.peak), y: points.map((one) => one.seconds), mode: name === "planned" ? "lines+markers" : "markers", name, meta: name, marker: { symbol, size: 11, color: colour_ }, line: { color: colour_, shape: "hv" }, text: points.map((one) => `${safe(one.text)}<br>${bytes(one.peak)}, ${seconds(one.seconds)}${data.axes ? "" : " added"}`), hovertemplate: "%{text}<extra></extra>" };
    }).filter((trace) => trace.x.length);
    const all = data.points.map((one) => one.peak);
    const [least, most] = [Math.min(...all), Math.max(...all)];
    const room = 0.05 * (most - least) || 1;
    const axis = { ...sizes(most, wide() ? 6 : 3, least), range: [least - room, most + room] };
    const heights = data.points.map((one) => one.seconds);
    const high = Math.max(...heights) || 1;
    const low = Math.min(...heights, 0);
    const shapes = data.budget ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: data.budget, x1: data.budget, line: { dash: "dash", color: colour("bad") } }] : [];
    Plotly.newPlot(plot, traces, layout({ hovermode: "closest", xaxis: { ...axis, title: { text: data.axes?.[0] ?? "peak" } }, yaxis: { title: { text: data.axes?.[1] ?? `seconds added${data.base ? ` to a step of ${seconds(data.base)}` : ""}` }, range: [low - 0.08 * (high - low), high + 0.08 * (high - low)] }, shapes, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" } }), config);
  };

  // Pictures are drawn when they come near the window, and all of them before the page is printed
  const all = [...document.querySelectorAll(".chart")];
  function drawn(figure) {
    if (figure.dataset.drawn) return;
    figure.dataset.drawn = "1";
    const data = charts[figure.dataset.chart];
    draw[data.kind](figure, figure.querySelector(".plot"), data);
    performance.mark("memplan:drawn");
  }
  const waiting = []; // one picture at a time, so that the page answers in between
  function next() {
    const figure = waiting.shift();
    if (!figure) return;
    drawn(figure);
    setTimeout(next, 0);
  }
  const near = new IntersectionObserver((entries) => {
    const idle = !waiting.length;
    waiting.push(...entries.filter((one) => one.isIntersecting && !one.target.dataset.drawn).map((one) => one.target));
    if (idle) next();
  }, { rootMargin: "200px" });
  all.forEach((figure) => near.observe(figure));
  addEventListener("beforeprint", () => all.forEach(drawn));
  addEventListener("themed", () => document.querySelectorAll(".js-plotly-plot").forEach((plot) => {
    const update = theme();
    (plot.layout.annotations ?? []).forEach((one, place) => {
      if (one.bgcolor) Object.assign(update, { [`annotations[${place}].bgcolor`]: colour("back"), [`annotations[${place}].arrowcolor`]: colour("text") });
      if (one.name === "rule") update[`annotations[${place}].font.color`] = colour("bad");
    });
    (plot.layout.shapes ?? []).forEach((one, place) => {
      if (one.type === "line") update[`shapes[${place}].line.color`] = colour("bad");
    });
    const total = plot.data.findIndex((one) => one.meta === "allocated");
    if (total >= 0) Plotly.update(plot, { "line.color": colour("text") }, update, [total]);
    else Plotly.relayout(plot, update);
  }));
})();
