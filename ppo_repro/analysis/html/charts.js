// The values of a chart under the pointer. They are in the chart's data-hover and enter the page as text.
(() => {
  // the index of the place nearest to x; places are in order
  function nearest(places, x) {
    let low = 0;
    let high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle][0] <= x) low = middle;
      else high = middle;
    }
    return Math.abs(places[low][0] - x) <= Math.abs(places[high][0] - x) ? low : high;
  }

  function prepare(chart) {
    const data = JSON.parse(chart.dataset.hover);
    const [, , width, height] = chart.getAttribute("viewBox").split(" ").map(Number);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("role", "status");
    tip.hidden = true;
    const cursor = document.createElementNS(chart.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    chart.append(cursor);
    chart.after(tip);
    const at = { place: -1 };

    function hide() {
      tip.hidden = true;
      cursor.setAttribute("d", "");
      at.place = -1;
    }

    function place(k, y) {
      const [x, text] = data.at[k];
      const box = chart.getBoundingClientRect();
      const scale = box.width / width;
      at.place = k;
      tip.textContent = text;
      tip.hidden = false;
      const left = chart.offsetLeft + x * scale + 12;
      const room = chart.offsetLeft + box.width - tip.offsetWidth;
      tip.style.left = Math.max(chart.offsetLeft, Math.min(left, room)) + "px";
      const above = chart.offsetTop + y * scale - tip.offsetHeight - 14;
      tip.style.top = (above < 0 ? chart.offsetTop + y * scale + 18 : above) + "px";
      cursor.setAttribute("d", "M" + x + " 0V" + (height - 46));
    }

    function move(event) {
      if (event.target.closest(".legend")) return hide(); // its own words are shown there
      const box = chart.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      const y = ((event.clientY - box.top) / box.height) * height;
      if (data.at.length) place(nearest(data.at, x), y);
    }

    function key(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!by || !data.at.length) return;
      place(Math.max(0, Math.min(data.at.length - 1, at.place + by)), height / 3);
      event.preventDefault();
    }

    chart.addEventListener("pointermove", move);
    chart.addEventListener("pointerdown", move);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("keydown", key);
    chart.addEventListener("blur", hide);
    return move;
  }

  for (const chart of document.querySelectorAll("svg[data-hover]")) {
    // most charts are never pointed at: their values are read when one is
    let move = null;
    const ready = () => (move = move || prepare(chart));
    chart.tabIndex = 0;
    chart.addEventListener("pointerenter", (event) => ready()(event), { once: true });
    chart.addEventListener("focus", ready, { once: true });
  }
})();
