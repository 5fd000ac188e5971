"use strict";
// Draws the charts of the page from the JSON beside them, as SVG. charts.py lists the keys that are read. No library,
// nothing from the network.

const SVG = "http://www.w3.org/2000/svg";
const DARK_OF = {"#000000": "#e7eaee", "#0072B2": "#56a8e0", "#767676": "#a3acb7", "#009E73": "#2fc79a"};

function element(name, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "path", "line", "text", "circle", "rect"].includes(name);
  const made = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
const shade = (colour) => (isDark() && DARK_OF[colour]) || colour;

function digits(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

// Three digits in every number of a column: 2.00 beside 2.07
function even(value) {
  const isPlain = value !== null && value !== undefined && Math.abs(value) >= 1e-4 && Math.abs(value) < 999.5;
  return isPlain ? value.toPrecision(3) : digits(value);
}

// Axes

function scale(low, high, from, to, isLog) {
  const f = isLog ? Math.log10 : (value) => value;
  const span = f(high) - f(low) || 1;
  return (value) => from + (to - from) * (f(value) - f(low)) / span;
}

function ticks(low, high, isLog) {
  const found = [];
  if (isLog) {
    const steps = high / low < 300 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power)
      for (const step of steps) found.push(step * 10 ** power);
  } else {
    const rough = (high - low) / 6 || 1, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) found.push(value);
  }
  return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
}

function frame(width, height, labels) {
  const box = {left: 56, right: width - 14, top: 12, bottom: height - 42};
  const svg = element("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0});
  svg.append(
    element("text", {x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle", class: "soft"}, labels.x),
    element("text", {x: 14, y: (box.top + box.bottom) / 2, "text-anchor": "middle", class: "soft",
                     transform: `rotate(-90 14 ${(box.top + box.bottom) / 2})`}, labels.y));
  return {svg, box};
}

function axes(svg, box, xs, ys, x, y) {
  for (const value of ys) {
    svg.append(element("line", {class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value)}),
               element("text", {x: box.left - 6, y: y(value) + 4, "text-anchor": "end"}, digits(value)));
  }
  let last = -Infinity;
  for (const value of xs) {
    if (x(value) - last < 44) continue;
    last = x(value);
    svg.append(element("text", {x: x(value), y: box.bottom + 18, "text-anchor": "middle"}, digits(value)));
  }
}

function marker(kind, x, y, colour, size = 4) {
  if (kind === "s") return element("rect", {x: x - size, y: y - size, width: 2 * size, height: 2 * size, fill: colour});
  if (kind === "x") {
    const at = `M${x - size},${y - size}L${x + size},${y + size}M${x - size},${y + size}L${x + size},${y - size}`;
    return element("path", {d: at, stroke: colour, "stroke-width": 2});
  }
  const corners = {"^": [[0, -1.2], [1.1, 1], [-1.1, 1]], v: [[0, 1.2], [1.1, -1], [-1.1, -1]],
                   D: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]]}[kind];
  if (corners) {
    const at = corners.map(([dx, dy]) => `${x + dx * size},${y + dy * size}`).join("L");
    return element("path", {d: `M${at}Z`, fill: colour});
  }
  return element("circle", {cx: x, cy: y, r: kind === "." ? size * .7 : size, fill: colour});
}

// Parts of a chart

function select(figure, label, names, onChange) {
  const box = element("select");
  names.forEach((name, index) => box.append(element("option", {value: index}, name)));
  box.addEventListener("change", () => onChange(Number(box.value)));
  return {box, whole: element("label", {}, label, box)};
}

function toggles(names, chosen, onChange) {
  const group = element("span", {class: "bar", role: "group"});
  names.forEach((name, index) => {
    const button = element("button", {type: "button", "aria-pressed": index === chosen}, name);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      onChange(index);
    });
    group.append(button);
  });
  return group;
}

function showTip(figure, svg, x, y, rows, title) {
  const tip = figure.querySelector(".tip");
  const body = rows.map(([colour, name, value]) => {
    const dot = element("td");
    dot.append(element("span", {style: `color:${colour}`}, "●"));
    return element("tr", {}, dot, element("th", {}, name), element("td", {}, value));
  });
  tip.replaceChildren(element("strong", {}, title), element("table", {}, ...body));
  tip.hidden = false;
  const place = svg.getBoundingClientRect(), around = figure.getBoundingClientRect();
  const left = place.left - around.left + x * place.width / svg.viewBox.baseVal.width;
  const isRight = left + tip.offsetWidth + 20 > around.width;
  tip.style.left = `${Math.max(0, isRight ? left - tip.offsetWidth - 14 : left + 14)}px`;
  tip.style.top = `${place.top - around.top + y}px`;
}

function plotWidth(figure) {
  return Math.max(300, Math.min(1240, figure.clientWidth || 900));
}

// Throughput, time or memory over the length

function lineChart(figure, chart) {
  const state = {choice: chart.start || 0, metric: 0, hidden: new Set(), at: null};
  const controls = element("div", {class: "controls"});
  const legend = element("div", {class: "controls legend"}), holder = element("div");
  const table = element("details"), tip = element("div", {class: "tip", "aria-live": "polite"});
  tip.hidden = true;
  if (chart.choices.length > 1) {
    const change = (index) => { state.choice = index; state.at = null; draw(); };
    const choice = select(figure, figure.dataset.label, chart.choices.map((one) => one.label), change);
    choice.box.value = state.choice;
    controls.append(choice.whole);
  } else {
    controls.append(element("strong", {}, chart.choices[0].label));
  }
  if (chart.metrics.length > 1) {
    controls.append(toggles(chart.metrics.map((one) => one.label), 0, (index) => { state.metric = index; draw(); }));
  }
  figure.append(controls, legend, holder, tip, table);

  function drawLegend(series) {
    legend.replaceChildren(...series.map((one) => {
      const sample = element("svg", {viewBox: "0 0 26 12", "aria-hidden": true});
      const colour = shade(one.colour);
      sample.append(element("line", {x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour, "stroke-width": one.strong ? 3 : 2,
                                     "stroke-dasharray": one.dash}), marker(one.marker, 13, 6, colour, 3.5));
      const button = element("button", {type: "button", "aria-pressed": !state.hidden.has(one.label)}, sample, one.label);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(one.label)) state.hidden.add(one.label);
        draw();
        [...legend.children].find((other) => other.textContent === one.label).focus();
      });
      return button;
    }));
  }

  function draw() {
    tip.hidden = true;
    const metric = chart.metrics[state.metric], series = chart.choices[state.choice].series;
    drawLegend(series);
    const seen = series.filter((one) => !state.hidden.has(one.label));
    const valuesOf = (one) => one.x.map((x, index) => [x, one[metric.key][index], one.note[index]])
      .filter(([, value]) => value !== null && (!metric.log || value > 0));
    const all = seen.flatMap(valuesOf);
    const width = plotWidth(figure), height = width < 500 ? 300 : 380;
    const {svg, box} = frame(width, height, {x: chart.x, y: metric.label});
    holder.replaceChildren(svg);
    drawTable(series, metric);
    if (!all.length) {
      svg.append(element("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, "nothing to show"));
      return;
    }
    const lengths = [...new Set(all.map(([x]) => x))].sort((a, b) => a - b);
    const values = all.map(([, value]) => value);
    const low = metric.log ? Math.min(...values) / 1.25 : 0, high = Math.max(...values) * (metric.log ? 1.25 : 1.06);
    const x = scale(lengths[0], lengths[lengths.length - 1] * 1.0001, box.left + 10, box.right - 10, true);
    const y = scale(low, high, box.bottom, box.top, metric.log);
    axes(svg, box, lengths, ticks(low, high, metric.log), x, y);
    for (const one of seen) {
      const colour = shade(one.colour), points = valuesOf(one);
      const path = points.map(([at, value], index) => `${index ? "L" : "M"}${x(at)},${y(value)}`).join("");
      svg.append(element("path", {d: path, fill: "none", stroke: colour, "stroke-width": one.strong ? 3 : 1.6,
                                  "stroke-dasharray": one.dash}));
      for (const [at, value] of points) svg.append(marker(one.marker, x(at), y(value), colour, one.strong ? 4.5 : 3.5));
    }
    const cursor = element("line", {class: "grid", y1: box.top, y2: box.bottom});
    cursor.style.display = "none";
    svg.append(cursor);
    svg.setAttribute("aria-label", `${metric.label} by ${chart.x}: ${chart.choices[state.choice].label}. ` +
                     "Left and right arrows show values.");
    const show = (index) => {
      state.at = index;
      const at = lengths[index];
      cursor.style.display = "";
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
      const rows = seen.map((one) => [one, valuesOf(one).find(([own]) => own === at)]).filter(([, found]) => found)
        .sort((a, b) => b[1][1] - a[1][1])
        .map(([one, [, value, note]]) => [shade(one.colour), one.label, `${even(value)} ${note}`]);
      showTip(figure, svg, x(at), box.top + 8, rows, `${chart.x} ${at}, ${metric.label}`);
    };
    const hide = () => { state.at = null; tip.hidden = true; cursor.style.display = "none"; };
    svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect(), at = (event.clientX - place.left) * width / place.width;
      let best = 0;
      lengths.forEach((length, index) => {
        if (Math.abs(x(length) - at) < Math.abs(x(lengths[best]) - at)) best = index;
      });
      show(best);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const from = state.at === null ? (step > 0 ? -1 : lengths.length) : state.at;
      show(Math.max(0, Math.min(lengths.length - 1, from + step)));
    });
  }

  function drawTable(series, metric) {
    const lengths = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const head = element("tr", {}, element("th", {}, metric.label),
                         ...lengths.map((length) => element("th", {scope: "col"}, String(length))));
    const body = series.map((one) => element("tr", {}, element("th", {scope: "row"}, one.label),
      ...lengths.map((length) => element("td", {class: "number"}, even(one[metric.key][one.x.indexOf(length)])))));
    const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    table.replaceChildren(element("summary", {}, "These values as a table"), element("div", {class: "scroll"}, whole));
  }

  figure.redraw = draw;
  draw();
}

// Labels at least a line apart, each with a thin line to its point: beside it, or all in one column
function label(svg, points, x, y, box, isColumn) {
  const ordered = [...points].sort((a, b) => y(a.y) - y(b.y)), places = points.map((point) => x(point.x));
  const middle = (box.left + box.right) * .62, last = Math.max(...places), first = Math.min(...places);
  let lowest = box.top;
  for (const point of ordered) {
    const at = lowest = Math.max(y(point.y), lowest + 14);
    const isLeft = (isColumn ? last : x(point.x)) > middle;
    const from = isColumn ? (isLeft ? first : last) : x(point.x), end = from + (isLeft ? -26 : 26);
    svg.append(element("line", {class: "grid", x1: x(point.x), y1: y(point.y), x2: end, y2: at}),
               element("text", {x: end + (isLeft ? -4 : 4), y: at + 4, "text-anchor": isLeft ? "end" : "start"},
                       point.label));
  }
}

// Points with a label each: rooflines and scatter plots

function pointChart(figure, choices, labels, options) {
  const state = {choice: 0, at: null};
  const controls = element("div", {class: "controls"}), holder = element("div");
  const tip = element("div", {class: "tip", "aria-live": "polite"}), table = element("details");
  tip.hidden = true;
  if (choices.length > 1) {
    const change = (index) => { state.choice = index; state.at = null; draw(); };
    controls.append(select(figure, figure.dataset.label, choices.map((one) => one.label), change).whole);
  } else {
    controls.append(element("strong", {}, choices[0].label));
  }
  const key = element("ol", {class: "points"});
  figure.append(controls, holder, key, tip, table);

  function draw() {
    tip.hidden = true;
    const choice = choices[state.choice], points = choice.points, width = plotWidth(figure);
    const height = width < 500 ? 320 : 400;
    const {svg, box} = frame(width, height, labels(choice));
    holder.replaceChildren(svg);
    const range = options.range(choice);
    const x = scale(range.x[0], range.x[1], box.left + 10, box.right - 10, options.isLog);
    const y = scale(range.y[0], range.y[1], box.bottom, box.top, options.isLog);
    axes(svg, box, ticks(...range.x, options.isLog), ticks(...range.y, options.isLog), x, y);
    if (options.under) options.under(svg, choice, x, y, range, box);
    const isWide = width >= 500, isLabelled = points.length <= (isWide ? 24 : 16);
    const labelled = isWide ? points : points.map((point, index) => ({...point, label: String(index + 1)}));
    if (isLabelled) label(svg, labelled, x, y, box, options.isColumn || !isWide);
    for (const point of points) svg.append(marker(point.marker, x(point.x), y(point.y), shade(point.colour), 5.5));
    key.replaceChildren(...(isWide || !isLabelled ? [] : points.map((point, index) => {
      const dot = element("span", {style: `color:${shade(point.colour)}`}, "●");
      return element("li", {}, element("b", {}, String(index + 1)), dot, ` ${point.label}`);
    })));
    const ring = element("circle", {r: 10, fill: "none", stroke: "currentColor", "stroke-width": 1.5});
    ring.style.display = "none";
    svg.append(ring);
    svg.setAttribute("aria-label", `${choice.label}: ${points.length} points. Left and right arrows show them.`);
    const order = points.map((_, index) => index).sort((a, b) => points[a].x - points[b].x);
    const show = (index) => {
      state.at = index;
      const point = points[order[index]], names = labels(choice);
      ring.style.display = "";
      ring.setAttribute("cx", x(point.x));
      ring.setAttribute("cy", y(point.y));
      const rows = [[shade(point.colour), names.y, even(point.y)], ["transparent", names.x, even(point.x)]];
      showTip(figure, svg, x(point.x), y(point.y), rows, point.label);
    };
    const hide = () => { state.at = null; tip.hidden = true; ring.style.display = "none"; };
    svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect(), ratio = width / place.width;
      const distance = (index) => Math.hypot(x(points[index].x) - (event.clientX - place.left) * ratio,
                                             y(points[index].y) - (event.clientY - place.top) * ratio);
      const best = order.reduce((a, b) => (distance(b) < distance(a) ? b : a), order[0]);
      if (distance(best) < 40) show(order.indexOf(best)); else hide();
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (event.key === "Escape") hide();
      if (!step || !points.length) return;
      event.preventDefault();
      const from = state.at === null ? (step > 0 ? -1 : points.length) : state.at;
      show(Math.max(0, Math.min(points.length - 1, from + step)));
    });
    const names = labels(choice);
    const head = element("tr", {}, element("th", {}, ""), element("th", {}, names.x), element("th", {}, names.y));
    const body = points.map((point) => element("tr", {}, element("th", {scope: "row"}, point.label),
      element("td", {class: "number"}, even(point.x)), element("td", {class: "number"}, even(point.y))));
    const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    table.replaceChildren(element("summary", {}, "These values as a table"), element("div", {class: "scroll"}, whole));
  }

  figure.redraw = draw;
  draw();
}

function roofline(figure, chart) {
  const choices = chart.levels.map((level) => ({
    label: level.label, level,
    points: chart.points.filter((point) => point.x[level.label]).map((point) => ({...point, x: point.x[level.label]})),
  }));
  const top = Math.max(...chart.tops.map((one) => one.value));
  pointChart(figure, choices, (choice) => ({x: `FLOP per byte of ${choice.label}`, y: "TFLOP/s"}), {
    isLog: true, isColumn: chart.isColumn,
    range(choice) {
      const xs = [...choice.points.map((point) => point.x), top / choice.level.value * 1e3];
      const ys = [...choice.points.map((point) => point.y), ...chart.tops.map((one) => one.value)];
      return {x: [Math.min(...xs) / 4, Math.max(...xs) * 4], y: [Math.min(...ys) / 3, Math.max(...ys) * 1.6]};
    },
    under(svg, choice, x, y, range, box) {
      const slope = choice.level.value / 1e3, ridge = top / slope;
      const left = Math.max(range.x[0], range.y[0] / slope);
      const at = `M${x(left)},${y(left * slope)}L${x(ridge)},${y(top)}L${x(range.x[1])},${y(top)}`;
      svg.append(element("path", {class: "roof", d: at}));
      for (const one of chart.tops) {
        const from = x(Math.max(range.x[0], one.value / slope));
        svg.append(element("path", {class: "roof", d: `M${from},${y(one.value)}L${x(range.x[1])},${y(one.value)}`}),
                   element("text", {x: x(range.x[1]), y: y(one.value) - 6, "text-anchor": "end"},
                           `${one.label} ${digits(one.value)} TFLOP/s`));
      }
      const isNarrow = box.right - box.left < 440;  // the slope is short, and the choice above names the memory
      const note = `${isNarrow ? "" : choice.label} ${digits(choice.level.value)} GB/s`.trim();
      const rise = Math.atan2(y(top) - y(left * slope), x(ridge) - x(left)) * 180 / Math.PI;  // along the slope
      svg.append(element("text", {x: x(left), y: y(left * slope), dx: 12, dy: -6,
                                  transform: `rotate(${rise} ${x(left)} ${y(left * slope)})`}, note));
    },
  });
}

function scatter(figure, chart) {
  pointChart(figure, chart.choices, () => ({x: chart.x, y: chart.y}), {
    isLog: false,
    range(choice) {
      const most = (key) => Math.max(...choice.points.map((point) => point[key]));
      return {x: [0, most("x") * 1.12], y: [0, most("y") * 1.08]};
    },
  });
}

// Panels of which one is shown

function panels(holder) {
  const all = [...holder.children], names = all.map((one) => one.dataset.panel);
  const controls = element("div", {class: "controls"});
  const show = (index) => {
    all.forEach((one, other) => { one.hidden = other !== index; });
    choice.box.value = index;
    back.disabled = index === 0;
    next.disabled = index === all.length - 1;
  };
  const choice = select(holder, holder.dataset.label, names, show);
  const back = element("button", {type: "button", "aria-label": "previous"}, "‹");
  const next = element("button", {type: "button", "aria-label": "next"}, "›");
  back.addEventListener("click", () => show(Number(choice.box.value) - 1));
  next.addEventListener("click", () => show(Number(choice.box.value) + 1));
  controls.append(choice.whole, back, next);
  holder.prepend(controls);
  show(0);
}

function redrawAll() {
  for (const figure of document.querySelectorAll("figure.chart")) if (figure.offsetParent) figure.redraw();
}

function start() {
  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    ({lines: lineChart, roofline, scatter})[chart.kind](figure, chart);
  }
  document.querySelectorAll(".panels").forEach(panels);
  const articles = [...document.querySelectorAll("article")];
  const buttons = [...document.querySelectorAll("button[data-device]")];
  const choose = (device) => {
    for (const article of articles) article.hidden = article.dataset.device !== device;
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.device === device);
    redrawAll();
  };
  for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.device));
  choose("0");
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    redrawAll();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redrawAll();
  });
}

start();
