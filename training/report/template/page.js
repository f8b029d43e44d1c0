"use strict";
// Click or Enter on a column's title sorts by it, again reverses. Numbers sort as numbers, what is missing comes last.
for (const table of document.querySelectorAll("table[id]")) {
  const titles = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column], exact = cell.querySelector("data");
    if (exact) return Number(exact.value);
    return cell.classList.contains("number") ? null : cell.textContent.trim();
  };
  titles.forEach((title, column) => title.firstElementChild.addEventListener("click", () => {
    const numbers = title.classList.contains("number");
    // The first click on numbers brings the largest to the top.
    const sorted = title.getAttribute("aria-sort");
    const order = sorted === "descending" ? "ascending" : sorted === "ascending" ? "descending" : numbers ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (numbers ? a - b : a.localeCompare(b));
    });
    for (const other of titles) other.removeAttribute("aria-sort");
    title.setAttribute("aria-sort", order);
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
// Gates over training: play, stop, one step back or on, or drag. Nothing moves unasked.
for (const player of document.querySelectorAll(".player")) {
  const frames = JSON.parse(player.dataset.frames), image = player.querySelector("svg image");
  const slider = player.querySelector("input"), said = player.querySelector("output"), play = player.querySelector("[data-play]");
  let timer = null;
  const show = (index) => {
    const [label, source] = frames[index];
    image.setAttributeNS("http://www.w3.org/1999/xlink", "href", source);
    slider.value = index;
    slider.setAttribute("aria-valuetext", said.textContent = label);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const advance = () => Number(slider.value) < frames.length - 1 ? show(Number(slider.value) + 1) : stop();
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) === frames.length - 1) show(0);
    timer = setInterval(advance, 250);
    play.textContent = "Pause";
  });
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  for (const button of player.querySelectorAll("[data-move]")) button.addEventListener("click", () => {
    stop();
    show(Math.min(frames.length - 1, Math.max(0, Number(slider.value) + Number(button.dataset.move))));
  });
  player.querySelector(".controls").hidden = false;
}
