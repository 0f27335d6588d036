// What the studio uses of markdown-it, whose one file has no types.
export interface Token {
  type: string;
  tag: string;
  nesting: -1 | 0 | 1;
  hidden: boolean;
  content: string;
  children: Token[];
  attrGet(name: string): string | null;
}

export default class MarkdownIt {
  constructor(preset: string, options: { html: boolean });
  validateLink: (url: string) => boolean;
  normalizeLink: (url: string) => string;
  enable(rules: string[]): this;
  parse(text: string, environment: object): Token[];
}
