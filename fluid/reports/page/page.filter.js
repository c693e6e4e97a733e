"use strict";
// Filters of trials: comparisons such as `lr > 0.1`, joined by and, or, not and brackets; other words are searched for.
const filters = (() => {
  const TOKEN = /\s*(?:"([^"]*)"|'([^']*)'|(<=|>=|!=|==|=|<|>|~)|([()])|([^\s()<>=~"'!]+)|(\S))/y;
  const JOINERS = new Set(["and", "or", "not", "&&", "||"]);

  function tokens(text) {
    const found = [];
    TOKEN.lastIndex = 0;
    while (TOKEN.lastIndex < text.trimEnd().length) {
      const [, double, single, operator, bracket, word, odd] = TOKEN.exec(text);
      const quoted = double !== undefined ? double : single;
      if (odd) throw Error(odd === "!" ? "write != or not, instead of !" : `a closing ${odd} is missing`);
      if (quoted !== undefined) found.push({ kind: "word", text: quoted, quoted: true });
      else if (operator) found.push({ kind: "operator", text: operator === "==" ? "=" : operator });
      else if (bracket) found.push({ kind: bracket, text: bracket });
      else if (JOINERS.has(word.toLowerCase())) {
        found.push({ kind: { "&&": "and", "||": "or" }[word] || word.toLowerCase(), text: word });
      } else found.push({ kind: "word", text: word });
    }
    return found;
  }

  // The column of a name: by its whole name, else by what follows its last "/". Names are compared in lower case.
  function columnOf(name, columns) {
    const wanted = name.toLowerCase();
    const exact = columns.find((column) => column.names.includes(wanted));
    if (exact) return exact;
    const inner = columns.filter((column) => column.names.some((known) => known.endsWith("/" + wanted)));
    if (inner.length === 1) return inner[0];
    if (inner.length) throw Error(`${name} may be ${inner.map((column) => column.title).join(" or ")}`);
    const start = wanted.slice(0, 2), near = columns.filter((column) => column.names.some((known) => known.startsWith(start)));
    const hint = (near.length ? near : columns).slice(0, 8).map((column) => column.title).join(", ");
    throw Error(`there is no column ${name}; there is ${hint}`);
  }

  const COMPARE = {
    "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
    "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  };
  function comparison(column, operator, value) {
    const figure = value.quoted || value.text === "" ? NaN : Number(value.text);
    const text = value.text.toLowerCase();
    const shown = (trial) => column.text(trial).toLowerCase();
    if (operator === "~") return (trial) => shown(trial).includes(text);
    const compare = COMPARE[operator];
    if (!Number.isNaN(figure)) {
      return (trial) => {
        const own = column.value(trial);
        if (typeof own === "number") return compare(own, figure);
        return operator === "!=" || (operator === "=" && shown(trial) === text);
      };
    }
    if (operator !== "=" && operator !== "!=") {
      throw Error(`${operator} needs a number behind it, and ${value.text || "nothing"} is none`);
    }
    if (column.numeric && !["none", "nan", "inf", "-inf"].includes(text)) {
      throw Error(`${column.title} is a number, and ${value.text || "nothing"} is none`);
    }
    const none = (trial) => { const own = column.value(trial); return own === null || own === undefined; };
    const same = (trial) => (text === "none" && none(trial)) || shown(trial) === text;
    return operator === "=" ? same : (trial) => !same(trial);
  }

  // Returns whether a trial passes, as a function; throws an Error that says what is wrong with the filter.
  function compile(text, columns) {
    const list = tokens(text);
    let at = 0;
    const kind = () => (at < list.length ? list[at].kind : "end");
    const searched = (trial) => columns.map((column) => column.text(trial)).join("\n").toLowerCase();
    function any() {
      const parts = [all()];
      while (kind() === "or") { at++; parts.push(all()); }
      return parts.length === 1 ? parts[0] : (trial) => parts.some((part) => part(trial));
    }
    function all() {
      const parts = [one()];
      while (!["end", "or", ")"].includes(kind())) { if (kind() === "and") at++; parts.push(one()); }
      return parts.length === 1 ? parts[0] : (trial) => parts.every((part) => part(trial));
    }
    function one() {
      const token = list[at++];
      if (!token) throw Error(list.length ? `something is missing after ${list[at - 2].text}` : "the filter is empty");
      if (token.kind === "not") { const part = one(); return (trial) => !part(trial); }
      if (token.kind === "(") {
        const part = any();
        if (kind() !== ")") throw Error("a closing ) is missing");
        at++;
        return part;
      }
      if (token.kind === "operator") throw Error(`a name is missing before ${token.text}`);
      if (token.kind === ")") throw Error("a ) is without its (");
      if (token.kind !== "word") throw Error(`something is missing before ${token.text}`);
      if (kind() !== "operator") {
        const wanted = token.text.toLowerCase();
        return (trial) => searched(trial).includes(wanted);
      }
      const operator = list[at++].text, column = columnOf(token.text, columns);
      if (kind() !== "word") throw Error(`a value is missing after ${token.text} ${operator}`);
      return comparison(column, operator, list[at++]);
    }
    if (!list.length) return () => true;
    const passes = any();
    if (at < list.length) throw Error(`a ${list[at].text} is without its (`);
    return passes;
  }
  return { compile };
})();
