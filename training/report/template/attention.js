// Where a token looks: choose a sentence and a head, then point at a token, reach it by the tab key, or press it.
for (const root of document.querySelectorAll(".attention")) {
  const data = JSON.parse(root.dataset.attention);
  const [sentence, head] = root.querySelectorAll("select");
  const columns = root.querySelectorAll(".tokens");
  const said = root.querySelector("[aria-live]");
  let asked = 0;

  const option = (select, label, value) => {
    const made = document.createElement("option");
    made.textContent = label;
    made.value = value;
    select.append(made);
  };

  const column = (place, tokens, tag) => {
    place.replaceChildren(...tokens.map((token) => {
      const made = document.createElement(tag);
      made.textContent = token;
      return made;
    }));
    return [...place.children];
  };

  const show = () => {
    const chosen = data.heads[Number(head.value)];
    const text = data.sentences[Number(sentence.value)];
    const weights = text.weights[chosen.site][chosen.head];
    const [queries, keys] = text.tokens[chosen.kind];
    asked = Math.min(asked, queries.length - 1);
    const buttons = column(columns[0], queries, "button");
    const cells = column(columns[1], keys, "span");
    const colour = () => {
      const row = weights[asked];
      buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(place === asked)));
      cells.forEach((cell, place) => {
        cell.style.backgroundColor = `rgb(213 94 0 / ${row[place]}%)`;
        cell.title = `${row[place]} %`;
      });
      const most = row.indexOf(Math.max(...row));
      said.textContent = `${queries[asked]} attends most to ${keys[most]} (${row[most]} %). ${chosen.roles}`;
    };
    buttons.forEach((button, place) => {
      button.type = "button";
      for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, () => {
        asked = place;
        colour();
      });
    });
    colour();
  };

  data.sentences.forEach((text, place) => option(sentence, text.name, place));
  data.heads.forEach((one, place) => option(head, `${one.name}: ${one.roles}`, place));
  head.value = String(data.first);
  for (const select of [sentence, head]) select.addEventListener("change", show);
  root.hidden = false;
  show();
}
