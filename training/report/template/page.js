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
