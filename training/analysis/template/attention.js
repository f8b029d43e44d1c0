"use strict";
const view = document.getElementById("view");
const data = JSON.parse(view.dataset.attention);
const [sentence, head] = ["sentence", "head"].map((name) => document.getElementById(name));
const columns = ["queries", "keys"].map((name) => document.getElementById(name));
const said = document.getElementById("said");
let asked = 0;

function option(select, label, value) {
  const made = document.createElement("option");
  made.textContent = label;
  made.value = value;
  select.append(made);
}

function column(place, tokens, tag) {
  place.replaceChildren(...tokens.map((token) => {
    const made = document.createElement(tag);
    made.textContent = token;
    return made;
  }));
  return [...place.children];
}

function shown() {
  const chosen = data.heads[Number(head.value)];
  const text = data.sentences[Number(sentence.value)];
  const weights = text.weights[chosen.site][chosen.head];
  const [queries, keys] = text.tokens[chosen.kind];
  asked = Math.min(asked, queries.length - 1);
  const buttons = column(columns[0], queries, "button");
  const cells = column(columns[1], keys, "span");
  function colour() {
    const row = weights[asked];
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(place === asked)));
    cells.forEach((cell, place) => {
      cell.style.backgroundColor = `rgb(213 94 0 / ${row[place]}%)`;
      cell.title = `${row[place]} %`;
    });
    const most = row.indexOf(Math.max(...row));
    said.textContent = `${queries[asked]} attends most to ${keys[most]} (${row[most]} %). ${chosen.roles}`;
  }
  buttons.forEach((button, place) => ["mouseenter", "focus", "click"].forEach((event) => button.addEventListener(event, () => {
    asked = place;
    colour();
  })));
  colour();
}

data.sentences.forEach((text, place) => option(sentence, text.name, place));
data.heads.forEach((one, place) => option(head, `${one.name}: ${one.roles}`, place));
head.value = String(data.first);
[sentence, head].forEach((select) => select.addEventListener("change", shown));
document.getElementById("interactive").hidden = false;
shown();
